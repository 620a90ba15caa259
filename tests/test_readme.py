import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_code_of_the_readme_runs(standard_promotion):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 2
    namespace: dict = {}
    for block in blocks:  # each goes on where the one before it ended
        exec(compile(block, "README.md", "exec"), namespace)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_what_the_readme_links_to_is_there(target):
    assert (ROOT / target).exists()


def test_the_table_of_names_is_the_public_interface():
    import jscale

    table = README[README.index("| name |") :]
    named = set(re.findall(r"`([A-Za-z_]+)", table[: table.index("\n\n")]))
    public = set(jscale.__all__)
    assert public == named

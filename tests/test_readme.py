import itertools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKS = sorted(
    {
        (page.relative_to(ROOT).as_posix(), target)
        for page in PAGES
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text())
    }
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, standard_promotion):
    """Each block goes on where the one before it ended; code of other libraries is only parsed."""
    text = page.read_text()
    namespace: dict = {}
    ran = 0
    for block in re.finditer(r"^```python(.*)\n((?s:.*?))^```", text, re.M):
        above = "\n" * text[: block.start(2)].count("\n")  # so that errors have the page's lines
        code = compile(above + block[2], page.name, "exec")
        if block[1] != " old":
            assert block[1] == ""
            exec(code, namespace)
            ran += 1
    assert ran >= 2


@pytest.mark.parametrize("page, target", LINKS, ids=itertools.starmap("{} {}".format, LINKS))
def test_what_a_page_links_to_is_there(page, target):
    assert (ROOT / page).parent.joinpath(target).exists()


def test_the_table_of_names_is_the_public_interface():
    import jscale

    table = README[README.index("| name |") :]
    named = set(re.findall(r"`([A-Za-z_]+)", table[: table.index("\n\n")]))
    public = set(jscale.__all__)
    assert public == named

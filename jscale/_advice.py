"""What `Monitor` can say, and when."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping

from ._arguments import as_count, as_number
from ._check import AT_MINIMUM, INVALID, LOST_LOSS, NOT_FINITE

# In the order in which they are said.
KINDS = "loss invalid rising stuck row falling burst skips group underflow zero flat high".split()


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """When `Monitor` speaks. Steps are counted by the step numbers that it is given.

    Attributes:
      window: steps over which overflows are counted and falls of the scale measured.
      settle: steps in a row without overflow that end the search for the first scale, whose skips
        mean nothing; ten times as many steps end it too. A run that is first seen after `window`
        steps has settled.
      fall: doublings that the scale is below its highest of the window, if it never was that low
        in it. On healthy runs rules that move by one stay within three.
      burst: overflows within 10 steps. A bad batch makes one, a wrong growth one.
      rise: how many times the mean of 20 losses is what they began at: the mean of the first 20
        seen, or 1.5 times the very first, if that is less. For positive losses only.
      row: steps in a row with gradients that are not finite, as in `check`. From 2^32 down to where
        gradients fit it takes some 16.
      stuck: overflows in a row in which the scale did not move: more than any usual hysteresis.
      skip_rate: share of the steps that overflow. A tenth of them is a tenth of the cost; rules of
        other systems skip 1 in 200 to 1 in 2000.
      lost: share of the nonzero gradients that are subnormal in float16 or would be zero, three
        times in a row.
      zero: steps in a row in which all gradients are zero.
      flat: steps without a move of the scale and without an overflow; intervals of 2000 are usual.
      unused: doublings that a flat scale could have grown.
      slack: doublings that a scale could fall before gradients are lost, while half of `skip_rate`
        is skipped.
      blame: share of the overflows that begin in one group or layer of several.
      repeat: steps before the same is said again.
    """

    window: int = 1000
    settle: int = 20
    fall: float = 4
    burst: int = 4
    rise: float = 2
    row: int = 20
    stuck: int = 5
    skip_rate: float = 0.1
    lost: float = 0.1
    zero: int = 20
    flat: int = 3000
    unused: float = 4
    slack: float = 10
    blame: float = 0.8
    repeat: int = 1000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                as_count(field.name, value)
            elif not as_number(field.name, value, f"{field.default} is the default") > 0:
                raise ValueError(f"{field.name} must be positive, got {value}.")


@dataclasses.dataclass(frozen=True)
class Advice:
    """What `Monitor` has to say.

    Attributes:
      kind: `loss`, `invalid`, `rising`, `stuck`, `row`, `falling`, `burst`, `skips`, `group`,
        `underflow`, `zero`, `flat` or `high`.
      step: the step at which it was seen.
      severity: `info`, `warning` or `error`.
      text: what is seen, what it is likely to mean, and what to do.
      evidence: the numbers behind it.
    """

    kind: str
    step: int
    severity: str
    text: str
    evidence: Mapping[str, float]

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}"


def words(
    kind: str, of: str, e: Mapping[str, float], losses: Iterable[tuple[int, float]]
) -> tuple[str, str]:
    """The severity of advice and its text; `of` is the name of the scale after " of ", or empty."""
    scale = f"the loss scale{of}"
    match kind:
        case "loss":
            came = "it came out of the forward pass as inf or NaN"
            return "error", f"the loss is not finite: {came}. {LOST_LOSS}"
        case "invalid":
            return "error", f"{scale} is {e['scale']}: {INVALID}"
        case "rising":
            return "warning", (
                f"the mean of the last 20 losses is {e['now']:.3g}, and they began at "
                f"{e['first']:.3g}: training diverges. Look at the learning rate, the batch size "
                "and the data; the scale is not to blame."
            )
        case "stuck":
            return "error", (
                f"gradients overflowed {e['overflows']} times in a row while {scale} stayed at "
                f"{e['scale']:g}: it is at its minimum, or static. {AT_MINIMUM}"
            )
        case "row":
            return "error", (
                f"gradients were not finite in {e['overflows']} steps in a row, without a lost "
                f"loss in the log; {scale} is {e['scale']:g}. {NOT_FINITE}"
            )
        case "falling":
            before = [loss for step, loss in losses if step <= e["since"]][-20:]
            *_, (_, now) = (0, 0.0), *losses
            went = (
                f", and the loss went from {statistics.median(before):.3g} to {now:.3g}"
                if before
                else ""
            )
            return "warning", (
                f"{scale} fell from 2^{e['from']:g} to 2^{e['to']:g} since step {e['since']:g}"
                f"{went}. Gradients grow, as they do before training diverges: look at the "
                "learning rate, the batch size and the data of these steps, and keep a checkpoint "
                "from before. The scale follows; a lower one mends nothing."
            )
        case "burst":
            return "warning", (
                f"gradients overflowed in {e['overflows']} of 10 steps, and {scale} is "
                f"2^{e['scale']:g}: a single bad batch does that once. Look at the data of these "
                "steps, and, if the loss has jumped, at the learning rate."
            )
        case "skips":
            return "warning", (
                f"{e['rate']:.0%} of the last {e['steps']} steps overflowed at {scale}: it comes "
                "back too soon, or gradients vary too much for it. A growth_interval of 100 skips "
                "one step in 100; log_normal() and headroom() keep clear of overflow."
            )
        case "group":
            return "warning", (
                f"{e['own']} of the last {e['overflows']} overflows began at the scale{of}: "
                "compute its largest activations in float32, or let the others go on with "
                'skip="own".'
            )
        case "underflow":
            room = e["headroom"]
            cure = (
                f"The gradients leave room for {room:.0f} doublings: start higher, as "
                "suggest_scale says, or grow sooner."
                if room >= 1
                else "The largest leave no room for more: give the parts that lose a scale of "
                "their own, with region, or compute them in float32."
            )
            return "warning", (
                f"{e['share']:.0%} of the nonzero gradients are too small for float16 at {scale}, "
                f"2^{e['scale']:g}. {cure}"
            )
        case "zero":
            return "warning", (
                f"all gradients have been zero for {e['steps']} steps at {scale}, {e['scale']:g}: "
                "they underflow, or the loss does not depend on these parameters. Start higher, as "
                "suggest_scale says, and look at what the mean of the loss is taken over."
            )
        case "flat":
            interval = 10 ** len(str(int(e["steps"] / e["headroom"] / 10)))
            return "info", (
                f"{scale} has stayed at 2^{e['scale']:g} for {e['steps']} steps, and gradients "
                f"leave room for {e['headroom']:.0f} doublings. If some underflow (stats tells), "
                f"grow sooner, with growth_interval={interval}, or start higher."
            )
        case _:
            cap = e["scale"] - e["slack"] + 4
            return "info", (
                f"{e['rate']:.0%} of the last {e['steps']} steps overflowed at {scale}, "
                f"2^{e['scale']:g}, which could be lower by {e['slack']:.0f} doublings before "
                f"gradients are lost: max_scale=2.0**{cap:.0f} skips fewer steps."
            )

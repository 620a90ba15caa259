"""The scale rule in plain Python: what the traced one must do, step by step."""

import dataclasses


@dataclasses.dataclass
class Dynamic:
    """All settings are powers of two in the tests, so Python's floats are exact here."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**32
    hysteresis: int = 1
    refill: str = "growth"

    def __post_init__(self):
        self.scale = self.init_scale
        self.clean_steps = 0
        self.overflows = 0  # since hysteresis was last refilled

    def update(self, finite: bool) -> None:
        if finite:
            self.clean_steps += 1
            if self.refill != "growth":
                self.overflows = 0
            if self.clean_steps == self.growth_interval:
                self.clean_steps = 0
                self.overflows = 0
                self.scale = min(self.scale * self.growth_factor, self.max_scale)
            return
        self.clean_steps = 0
        self.overflows += 1
        if self.overflows >= self.hysteresis:
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            if self.refill == "drop":
                self.overflows = 0


def scales(settings: dict, flags: list[bool]) -> list[float]:
    """The scale before each step, and the one after the last."""
    rule = Dynamic(**settings)
    out = [rule.scale]
    for finite in flags:
        rule.update(finite)
        out.append(rule.scale)
    return out

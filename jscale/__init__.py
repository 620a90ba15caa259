"""Float16 training in JAX: loss scaling as an optax wrapper, and the parts it is made of."""

from . import checkpoint as checkpoint, interop as interop, plot as plot, presets as presets
from ._advice import Advice, Thresholds
from ._amp import Amp, amp
from ._autocast import Explanation, Operation, autocast, explain
from ._check import check
from ._finite import all_finite, select
from ._forecast import Forecast
from ._grad import grad, scale_loss, unscale, value_and_grad
from ._locate import locate
from ._location import Fault, Location, Underflow
from ._master import MasterWeightsState, with_master_weights
from ._monitor import Monitor
from ._optimizer import with_loss_scale
from ._policy import Policy
from ._predictive import Guard, HeadroomState, LogNormalState, headroom, log_normal
from ._region import region
from ._rules import (
    DynamicState,
    Observation,
    OffState,
    ScaleRule,
    StaticState,
    dynamic,
    off,
    static,
)
from ._state import LossScaleState, loss_scale, metrics
from ._stats import Stats, stats
from ._suggest import Suggestion, suggest_scale
from ._wrappers import AnticipateState, anticipate, hooked, stacked

__version__ = "0.1.0"

# For `help(jscale)`, which shows the names of other modules only if they are listed.
__all__ = [
    "Advice",
    "Amp",
    "AnticipateState",
    "DynamicState",
    "Explanation",
    "Fault",
    "Forecast",
    "Guard",
    "HeadroomState",
    "Location",
    "LogNormalState",
    "LossScaleState",
    "MasterWeightsState",
    "Monitor",
    "Observation",
    "OffState",
    "Operation",
    "Policy",
    "ScaleRule",
    "StaticState",
    "Stats",
    "Suggestion",
    "Thresholds",
    "Underflow",
    "all_finite",
    "amp",
    "anticipate",
    "autocast",
    "check",
    "checkpoint",
    "dynamic",
    "explain",
    "grad",
    "headroom",
    "hooked",
    "interop",
    "locate",
    "log_normal",
    "loss_scale",
    "metrics",
    "off",
    "plot",
    "presets",
    "region",
    "scale_loss",
    "select",
    "stacked",
    "static",
    "stats",
    "suggest_scale",
    "unscale",
    "value_and_grad",
    "with_loss_scale",
    "with_master_weights",
]

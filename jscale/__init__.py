"""Float16 training in JAX: loss scaling as an optax wrapper, and the parts it is made of."""

from ._check import check as check
from ._finite import all_finite as all_finite, select as select
from ._grad import (
    grad as grad,
    scale_loss as scale_loss,
    unscale as unscale,
    value_and_grad as value_and_grad,
)
from ._optimizer import (
    LossScaleState as LossScaleState,
    loss_scale as loss_scale,
    metrics as metrics,
    with_loss_scale as with_loss_scale,
)
from ._policy import Policy as Policy
from ._rules import (
    DynamicState as DynamicState,
    Observation as Observation,
    OffState as OffState,
    ScaleRule as ScaleRule,
    StaticState as StaticState,
    dynamic as dynamic,
    off as off,
    static as static,
)

__version__ = "0.1.0"

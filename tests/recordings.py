"""Recorded runs of other systems' scalers: steps, and the scale before each and after the last.

Each file of golden/traces says which class was run, from where, and how; a recording has its name,
the parameters, `found_inf` for each step, and what else the scaler keeps, after each step.
"""

import functools
import gzip
import json
import pathlib

import numpy as np

from jscale import presets

TRACES = pathlib.Path(__file__).parent / "golden" / "traces"
LOWEST, HIGHEST = 2.0**-126, 2.0**126

# The parameters of a recording are the preset's arguments, but for three classes' own names.
PRESETS = {
    "apex_amp_lossscaler": presets.apex,
    "apex_fp16utils_dynamiclossscaler": presets.apex_fp16_utils,
    "apex_update_scale_hysteresis": presets.apex_hysteresis,
    "deepspeed_dynamiclossscaler": presets.deepspeed,
    "deepspeed_fp16_optimizer": lambda init_scale, scale_window, min_loss_scale: presets.deepspeed(
        init_scale, scale_window, min_loss_scale, delayed_shift=1
    ),
    "fairseq_dynamiclossscaler": presets.fairseq,
    "keras_lossscaleoptimizer_jax": presets.keras,
    "keras_lossscaleoptimizer_tensorflow": presets.keras,
    "megatron_dynamicgradscaler": presets.megatron,
    "mindspore_dynamiclossscalemanager": presets.mindspore,
    "mindspore_dynamiclossscaler": lambda scale_value, **p: presets.mindspore(scale_value, **p),
    "mindspore_updatecell": lambda loss_scale_value, **p: presets.mindspore(loss_scale_value, **p),
    "openseq2seq_backoff": presets.openseq2seq_backoff,
    "openseq2seq_logmax": presets.openseq2seq_logmax,
    "paddle_gradscaler_eager": presets.paddle,
    "paddle_update_loss_scaling_op": functools.partial(presets.paddle, static_graph=True),
    "tf_keras_legacy_dynamiclossscalestate": presets.tensorflow,
    "tf_v1_dynamiclossscale": presets.tensorflow,
    "torch_fsdp_sharded_cpu": presets.torch,
    "torch_gradscaler": presets.torch,
}


@functools.cache
def recordings(system):
    text = gzip.decompress((TRACES / f"{system}.json.gz").read_bytes())
    return {trace["name"]: trace for trace in json.loads(text)["traces"]}


def leaves_bounds(trace):
    """The first step before which the recorded scale is out of jscale's bounds, or None."""
    scales = np.float64(trace["scale"])
    inside = (scales >= LOWEST) & (scales <= HIGHEST)
    return None if inside.all() else int(np.argmin(inside))

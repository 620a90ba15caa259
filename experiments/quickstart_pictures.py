"""The pictures that quickstart.py writes."""

import math

import numpy as np
from matplotlib.figure import Figure

STYLES = {  # told apart without colours
    "float32": {"color": "0.7", "linewidth": 5},
    "bfloat16": {"color": "C1", "linestyle": (0, (4, 2)), "linewidth": 2.5},
    "float16": {"color": "C3", "linestyle": "-."},
    "float16-static": {"color": "C0", "linestyle": ":", "linewidth": 2.5},
    "float16-dynamic": {"color": "black", "linewidth": 1},
}


def power(scale):
    return f"2^{math.log2(scale):g}"


def draw(folder, results, grads):
    """Three pictures, side by side and one by one."""
    figure = Figure(figsize=(16, 4.5), layout="constrained")
    loss_ax, scale_ax, range_ax = axes = figure.subplots(1, 3)
    for name, (_, columns, _) in results.items():
        step, bits, scale = (columns[k] for k in ("step", "bits_per_byte", "grad_scale"))
        n = min(10, len(bits))
        smooth = np.convolve(bits, np.ones(n) / n, "valid")
        loss_ax.plot(step[n - 1 :], smooth, label=name, **STYLES[name])
        scale_ax.step(step, scale, where="post", label=name, **STYLES[name])
        skipped = ~columns["finite"]
        label = "step skipped" if skipped.any() else None
        scale_ax.plot(step[skipped], 2.5 * scale[skipped], "kv", label=label)
    loss_ax.set(title="Training loss", xlabel="step", ylabel="bits per byte, mean of 10 steps")
    loss_ax.legend(handlelength=4)
    scale_ax.set(title="Loss scale", xlabel="step", ylabel="loss scale of the step")
    scale_ax.set_yscale("log", base=2)
    scale_ax.set_yticks([2.0**k for k in range(0, 33, 4)])
    scale_ax.legend(handlelength=4, ncols=2)

    # Against what float16 can hold, as Micikevicius et al. (2018) draw it.
    sizes = np.abs(grads).ravel()
    edges = np.arange(-60, 21)
    peak = 0
    scale = max(columns["grad_scale"][-1] for _, columns, _ in results.values())
    for factor, label, style in (
        (1, "not scaled", STYLES["float16"]),
        (scale, f"times {power(scale)}", STYLES["float16-dynamic"]),
    ):
        counts, _ = np.histogram(np.log2(sizes[sizes > 0] * factor), edges)
        lost = np.mean(sizes * factor < 2.0**-25)
        range_ax.stairs(counts / sizes.size, edges, label=f"{label}: {lost:.0%} lost", **style)
        peak = max(peak, counts.max() / sizes.size)
    for left, right, shade, text in (
        (-60, -25, "0.8", "lost: rounded to zero"),
        (-25, -14, "0.92", "sub-\nnormal"),
        (-14, 16, "1", "normal"),
        (16, 20, "0.8", "inf"),
    ):
        range_ax.axvspan(left, right, color=shade, zorder=0)
        range_ax.text((left + right) / 2, 1.4 * peak, text, ha="center", va="center")
    range_ax.set(title="Gradients of the logits in float16", xlabel="log2 of magnitude")
    range_ax.set(ylabel="share of elements", xlim=(-60, 20), ylim=(0, 1.5 * peak))
    range_ax.legend(loc="upper left", bbox_to_anchor=(0, 0.9), handlelength=4)

    figure.savefig(folder / "quickstart.png")
    for name, ax in zip(("loss_curves", "loss_scale", "gradient_histogram"), axes, strict=True):
        box = ax.get_tightbbox().padded(8).transformed(figure.dpi_scale_trans.inverted())
        figure.savefig(folder / f"{name}.png", bbox_inches=box, dpi=150)

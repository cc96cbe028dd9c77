"""Forward and backward through a model of any size, one layer's weights on the device at a time.

The input of every layer is spilled to a file on the way up; on the way down each layer is run again and differentiated
with respect to its input and to its routed experts' output. All steps leave files that a later run finds, so work that
was killed goes on at the layer where it was.

    stream = Stream(model, windows, folder)
    routing = stream.forward()
    for trace in stream.backward(chosen):        # last layer first; what is made of it is kept by the caller
        for expert in range(trace.num_experts):
            for rows in trace.rows(expert):      # inputs, gates, loss gradients, sequence of each routed token
                ...

The loss is the sum over a window of the negative log-likelihoods of tokens that the model itself draws, one a position.
Its gradient at a position has as second moment the Fisher information of that position's own and all later
predictions (scores of different positions are uncorrelated), so half the mean square of an error along it is the KL
divergence, in nats a token, that the error causes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from calib.model import Functions, StreamedModel
from calib.rows import LayerTrace
from calib.spill import Spill

# Tokens run at once.
BATCH_TOKENS = 2048


class Routing(NamedTuple):
    """What the router did in each window: ``count`` int64[n, L, E] choices, ``mass`` and ``square`` float64[n, L, E]
    sums of gates and of their squares."""

    count: np.ndarray
    mass: np.ndarray
    square: np.ndarray


@dataclass
class Stream:
    """``model`` on ``windows`` int32[n, T]; files go to ``folder``. ``seed`` draws the tokens of the loss.

    ``progress(stage, done, total)`` counts layers times batches.
    """

    model: StreamedModel
    windows: np.ndarray
    folder: Path
    seed: int = 0
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None

    def __post_init__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.batch = batch_windows(*self.windows.shape)

    def forward(self) -> Routing:
        """Run all windows up to the last layer and return their routing; layers that are there are not run again."""
        model, (count, length), layers = self.model, self.windows.shape, self.model.num_layers
        batches = self._batches(np.arange(count))
        if not self._inputs_path(0).exists() and not self._routing_path(0).exists():
            with self._spill(self._inputs_path(0), count) as out:
                for take, used in batches:
                    x = model.embed(self.windows[take])[:used]
                    out.write(int(take[0]) * length, x.reshape(used * length, -1))
                out.commit()
        for layer in range(layers):
            if self._routing_path(layer).exists():
                continue
            params, kind = model.layer(layer), model.kind(layer)
            parts = []
            self._inputs_path(layer + 1).unlink(missing_ok=True)
            with (
                self._spill(self._inputs_path(layer), count) as source,
                self._spill(self._inputs_path(layer + 1), count) as out,
            ):
                for number, (take, used) in enumerate(batches):
                    x, routing = _forward(model.functions, kind, params, self._read(source, take, 0))
                    first = int(take[0]) * length
                    out.write(first, np.asarray(x)[:used].reshape(used * length, -1))
                    parts.append(np.asarray(routing, np.float64)[:, :used])
                    self.progress("forward", layer * len(batches) + number + 1, layers * len(batches))
                out.commit()
            # Before the next layer comes, or two would be on the device.
            del params
            save_array(self._routing_path(layer), np.concatenate(parts, axis=1))
        stored = np.stack([np.load(self._routing_path(i)) for i in range(layers)], axis=2)
        return Routing(stored[0].astype(np.int64), stored[1], stored[2])

    def losses(self) -> np.ndarray:
        """Mean next-token loss float64[n] of each chosen window, once :meth:`backward` has begun."""
        return np.load(self.folder / "losses.npy")

    def backward(self, chosen: np.ndarray) -> Iterator[LayerTrace]:
        """Traces of the layers, last first, over the windows ``chosen`` int[m].

        When the caller asks for the next layer, this one counts as done and its files go, so what is made of a trace
        must be kept before. A later run starts at the first layer that is not done. ValueError where a loss is not
        finite.
        """
        model, length, layers = self.model, self.windows.shape[1], self.model.num_layers
        batches, total = self._batches(chosen), len(chosen)
        done = [layer for layer in range(layers + 1) if self._gradient_path(layer).exists()]
        if not done:
            self._start(chosen, batches)
        for layer in reversed(range(min(done, default=layers))):
            params, kind = model.layer(layer), model.kind(layer)
            below = self._spill(self._gradient_path(layer), total)
            inputs, gradients = (self._spill(self.folder / f"{name}.bin", total) for name in ("inputs", "at_experts"))
            experts, gates, square = [], [], np.zeros(model.hidden_size)
            with (
                self._spill(self._inputs_path(layer), len(self.windows)) as source,
                self._spill(self._gradient_path(layer + 1), total) as above,
            ):
                for number, (take, used) in enumerate(batches):
                    first, rows = number * self.batch * length, used * length
                    x, up = self._read(source, take, 0), self._read(above, np.arange(len(take)), first)
                    down, at_experts, trace = _backward(model.functions, kind, params, x, up)
                    flat = lambda a, rows=rows: np.asarray(a).reshape(-1, a.shape[-1])[:rows]  # noqa: E731
                    below.write(first, flat(down))
                    inputs.write(first, flat(trace.inputs))
                    gradients.write(first, flat(at_experts))
                    experts.append(flat(trace.experts))
                    gates.append(flat(trace.gates))
                    square += np.square(flat(at_experts), dtype=np.float64).sum(0)
                    step = (layers - 1 - layer) * len(batches) + number + 1
                    self.progress("backward", step, layers * len(batches))
            del params
            yield LayerTrace(
                layer=layer,
                experts=np.concatenate(experts),
                gates=np.concatenate(gates),
                sequences=np.repeat(np.arange(total), length),
                num_experts=model.functions.num_experts,
                inputs=inputs,
                gradients=gradients,
                fisher=square / (total * length),
            )
            below.commit()
            below.close()
            inputs.close(remove=True)
            gradients.close(remove=True)
            self._gradient_path(layer + 1).unlink()
            self._inputs_path(layer).unlink()

    def _start(self, chosen: np.ndarray, batches: list) -> None:
        """Losses of the chosen windows, and their gradient at the output of the last layer."""
        layers, length = self.model.num_layers, self.windows.shape[1]
        head, losses = self.model.head(), []
        with (
            self._spill(self._inputs_path(layers), len(self.windows)) as source,
            self._spill(self._gradient_path(layers), len(chosen)) as out,
        ):
            for number, (take, used) in enumerate(batches):
                x, tokens = self._read(source, take, 0), jnp.asarray(self.windows[take])
                loss, gradient = _head(self.model.functions, head, x, tokens, jnp.asarray(take), self.seed)
                losses.append(np.asarray(loss, np.float64)[:used])
                bad = np.flatnonzero(~np.isfinite(losses[-1]))
                if bad.size:
                    raise ValueError(
                        f"the loss of calibration window {take[bad[0]]} is {losses[-1][bad[0]]}: "
                        "the model or its weights are broken"
                    )
                rows = used * length
                out.write(number * self.batch * length, np.asarray(gradient).reshape(-1, out.width)[:rows])
                self.progress("head", number + 1, len(batches))
            save_array(self.folder / "losses.npy", np.concatenate(losses))
            out.commit()

    def _batches(self, windows: np.ndarray) -> list[tuple[np.ndarray, int]]:
        """Window numbers in batches of one size, and how many of each batch count: the last repeats its last one."""
        batches = []
        for first in range(0, len(windows), self.batch):
            take = windows[first : first + self.batch]
            batches.append((np.concatenate([take, np.repeat(take[-1:], self.batch - len(take))]), len(take)))
        return batches

    def _read(self, spill: Spill, windows: np.ndarray, first: int) -> jax.Array:
        """Float32[B, T, H] of whole windows whose rows start at ``first``; past the end, the last one again."""
        length = self.windows.shape[1]
        last = (spill.rows - first) // length - 1
        rows = (np.minimum(windows, last)[:, None] * length + np.arange(length)).reshape(-1)
        return jnp.asarray(spill.take(first + rows).reshape(len(windows), length, spill.width))

    def _spill(self, path: Path, windows: int) -> Spill:
        return Spill(path, windows * self.windows.shape[1], self.model.hidden_size)

    def _inputs_path(self, layer: int) -> Path:
        return self.folder / f"input_{layer:03d}.bin"

    def _routing_path(self, layer: int) -> Path:
        return self.folder / f"routing_{layer:03d}.npy"

    def _gradient_path(self, layer: int) -> Path:
        return self.folder / f"gradient_{layer:03d}.bin"


def batch_windows(windows: int, length: int) -> int:
    """Windows of ``length`` tokens that run at once, of ``windows`` in all."""
    return max(1, min(BATCH_TOKENS // length, windows))


def spill_bytes(windows: int, chosen: int, length: int, hidden: int, layers: int) -> int:
    """Most bytes that a :class:`Stream` has on disk at once."""
    return 4 * length * hidden * (windows * (layers + 1) + 4 * chosen)


def save_array(path: Path, array: np.ndarray) -> None:
    """``np.save``, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        np.save(file, array)
    temporary.replace(path)


@partial(jax.jit, static_argnums=(0, 1))
def _forward(functions: Functions, kind, params, x):
    """Output of a layer, and [3, B, E]: choices, gates and squared gates of each expert in each window."""
    x, trace = functions.run(kind, params, x, jnp.zeros_like(x))
    batch, experts = x.shape[0], trace.experts.reshape(x.shape[0], -1)
    gates = trace.gates.reshape(experts.shape)
    row = jnp.arange(batch)[:, None]
    add = lambda v: jnp.zeros((batch, functions.num_experts)).at[row, experts].add(v)  # noqa: E731
    return x, jnp.stack([add(jnp.ones_like(gates)), add(gates), add(gates * gates)])


@partial(jax.jit, static_argnums=(0, 1))
def _backward(functions: Functions, kind, params, x, above):
    """Loss gradients at the input and at the routed experts' output of a layer, and its trace."""
    _, pull, trace = jax.vjp(partial(functions.run, kind, params), x, jnp.zeros_like(x), has_aux=True)
    below, at_experts = pull(above)
    return below, at_experts, trace


@partial(jax.jit, static_argnums=0)
def _head(functions: Functions, head, x, tokens, numbers, seed):
    """Mean next-token loss of each window, and the gradient of its drawn loss at the last layer's output."""

    def one(item):
        x, tokens, number = item
        key = jax.random.fold_in(jax.random.key(seed), number)
        (_, mean), gradient = jax.value_and_grad(lambda x: functions.loss(head, x, tokens, key), has_aux=True)(x)
        return mean, gradient

    return jax.lax.map(one, (x, tokens, numbers))

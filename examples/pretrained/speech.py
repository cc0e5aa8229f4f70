"""silero-vad, which finds speech in sound: a PyTorch network with an LSTM, and sounds."""

from __future__ import annotations

import functools
import itertools
import pydoc_data.topics
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import scipy.ndimage
import scipy.signal
from jax import lax
from onnx import numpy_helper
from safetensors.numpy import load_file

Params = dict[str, jax.Array]

PACKAGE = "silero-vad==6.2.3"
DENSE = ("stft_conv.weight", "final_conv.weight")  # a Fourier transform; a single output
UNEVEN = ("conv1.weight",)  # 129 inputs, which groups of four do not divide
RATE = 16_000  # samples a second
STEP, CONTEXT = 512, 64  # samples that a decision is about, and those before them
STEPS = 312  # decisions of a clip: 10 seconds
VOICES = (("en-us", "de", "it+f4", "pl+m7"), ("en-gb+f3", "fr", "es+m3", "sv+f2"))  # by part


def load(folder: Path) -> tuple[Params, Path]:
    """Reads the weights, under the names and in the shapes that PyTorch gives them.

    Args:
      folder: gets the files of the package, without PyTorch, which the package depends on.

    Returns:
      (params, path): the weights, and an ONNX file of the same network with other weights.
    """
    data = folder / "silero_vad" / "data"
    if not data.exists():
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, PACKAGE], check=True)
    arrays = load_file(data / "silero_vad_16k.safetensors")
    params = {name: jnp.asarray(array) for name, array in arrays.items()}
    return params, data / "silero_vad_16k_op15.onnx"


def save(path: Path, params: Params, target: Path) -> None:
    """Writes a copy of the ONNX file that has these parameters."""
    model = onnx.load(path)
    names = {
        "model.": "",
        "stft.forward_basis_buffer": "stft_conv.weight",
        "decoder.rnn": "lstm_cell",
    }
    names |= {f"encoder.{i}.reparam_conv": f"conv{i + 1}" for i in range(4)}
    names |= {"decoder.decoder.2": "final_conv"}
    for tensor in model.graph.initializer:
        name = functools.reduce(lambda name, pair: name.replace(*pair), names.items(), tensor.name)
        if name in params:
            array = np.asarray(params[name]).reshape(tuple(tensor.dims))
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, target)


def run_onnx(path: Path, chunks: np.ndarray) -> np.ndarray:
    """Returns the probabilities of speech, [clips, steps], that onnxruntime finds."""
    session = onnxruntime.InferenceSession(path)
    state = np.zeros((2, len(chunks), 128), np.float32)
    outputs = []
    for x in np.swapaxes(chunks, 0, 1):
        output, state = session.run(None, {"input": x, "state": state, "sr": np.array(RATE)})
        outputs.append(output[:, 0])
    return np.stack(outputs, axis=1)


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    """`torch.nn.functional.conv1d`: [batch, channels, time] and [outputs, channels, width]."""
    return lax.conv_general_dilated(x, kernel, [stride], [(padding, padding)])


def fn(params: Params, chunks: jax.Array) -> jax.Array:
    """Finds speech in clips that start in silence.

    Args:
      params: the arrays of `load`.
      chunks: [clips, steps, CONTEXT + STEP] samples.

    Returns:
      [clips, steps], the log odds of speech.
    """
    clips, steps, samples = chunks.shape
    x = jnp.pad(chunks.reshape(clips * steps, samples), ((0, 0), (0, CONTEXT)), "reflect")
    x = convolve(x[:, None], params["stft_conv.weight"], stride=128)
    x = jnp.sqrt(x[:, :129] ** 2 + x[:, 129:] ** 2)
    for number, stride in enumerate((1, 2, 2, 1), start=1):
        x = convolve(x, params[f"conv{number}.weight"], stride, padding=1)
        x = jax.nn.relu(x + params[f"conv{number}.bias"][:, None])
    # The share of the inputs in the gates needs no recurrence: one product for all steps.
    gates = x.reshape(clips, steps, -1) @ params["lstm_cell.weight_ih"].T
    gates += params["lstm_cell.bias_ih"] + params["lstm_cell.bias_hh"]

    def step(state: tuple[jax.Array, jax.Array], gates: jax.Array):
        hidden, cell = state
        gates = gates + hidden @ params["lstm_cell.weight_hh"].T
        i, f, g, o = jnp.split(gates, 4, axis=1)  # PyTorch's order; ONNX has i, o, f, g
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((clips, params["lstm_cell.weight_hh"].shape[1]))
    _, hidden = lax.scan(step, (zeros, zeros), jnp.swapaxes(gates, 0, 1))
    x = jax.nn.relu(hidden) @ params["final_conv.weight"][:, :, 0].T + params["final_conv.bias"]
    return jnp.swapaxes(x[..., 0], 0, 1)


def record(part: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes clips: sentences of espeak-ng with pauses, in noise, hum and tones.

    Args:
      part: 0 to calibrate with, 1 to test with: other voices, other sentences.
      count: clips.
      seed: of sentences, pauses and sounds.

    Returns:
      (chunks, truth): float32[count, STEPS, CONTEXT + STEP] for `fn`; bool[count, STEPS], whether
      somebody speaks. Gaps within a sentence, of less than 0.2 seconds, count as speech.
    """
    random = np.random.default_rng([part, seed])
    sentences = _sentences()[part::2]
    clips = []
    for voice in itertools.islice(itertools.cycle(VOICES[part]), count):
        clean = np.zeros(STEPS * STEP)
        at = int(random.uniform(0.2, 1.5) * RATE)
        while at < len(clean):
            speech = _speak(sentences[random.integers(len(sentences))], voice)
            speech = speech[: len(clean) - at] * 10 ** random.uniform(-1.5, -0.3)
            clean[at : at + len(speech)] = speech
            at += len(speech) + int(random.uniform(0.5, 3) * RATE)
        clips.append((clean, clean + _sounds(random, len(clean), np.std(clean))))
    power = np.array([(clean.reshape(STEPS, STEP) ** 2).mean(1) for clean, _ in clips])
    noisy = np.pad([noisy for _, noisy in clips], ((0, 0), (CONTEXT, 0))).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(noisy, CONTEXT + STEP, axis=1)
    is_loud = power > 1e-3 * power.max(axis=1, keepdims=True)
    return windows[:, ::STEP].copy(), scipy.ndimage.binary_closing(is_loud, np.ones((1, 7)))


def _sentences() -> list[str]:
    """Sentences of Python's manual, without code."""
    text = " ".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    return re.findall(r"(?<=\. )[A-Z][a-z ,]{40,120}\.", re.sub(r"\s+", " ", text))


def _speak(sentence: str, voice: str) -> np.ndarray:
    """Speaks a sentence at `RATE`, with values in [-1, 1]."""
    if shutil.which("espeak-ng") is None:
        sys.exit("error: there is no espeak-ng to speak with: apt-get install espeak-ng")
    spoken = subprocess.run(
        ["espeak-ng", "--stdout", "-v", voice, sentence], capture_output=True, check=True
    ).stdout
    samples = np.frombuffer(spoken[44:], np.int16) / 32768  # after the header, at 22,050 a second
    return scipy.signal.resample_poly(samples, 320, 441)


def _sounds(random: np.random.Generator, length: int, level: float) -> np.ndarray:
    """Makes noise of any colour, hum and a melody of tones, 0 to 20 dB below speech."""
    frequencies = np.fft.rfftfreq(length, 1 / RATE)
    colour = np.maximum(frequencies, 20) ** -random.uniform(0, 1)
    noise = np.fft.irfft(np.fft.rfft(random.normal(size=length)) * colour, length)
    time = np.arange(length) / RATE
    hum = sum(np.sin(2 * np.pi * 50 * k * time) / k for k in (1, 2, 3))
    pitches = 110 * 2 ** (random.integers(0, 36, STEPS // 12) / 12)
    tones = np.sin(2 * np.pi * np.cumsum(np.repeat(pitches, 12 * STEP)) / RATE)
    levels = level * 10 ** random.uniform(-1, [0, -0.3, 0])
    return sum(
        gain * sound / np.std(sound)
        for gain, sound in zip(levels, (noise, hum, tones), strict=True)
    )

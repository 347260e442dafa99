"""Live curves: event files that TensorBoard reads, grouped by layer; heat maps; wandb only when the job has it."""

import struct
import sys
import types
import zlib

import numpy as np
import pytest

from msprobe_megatron.job.features.monitor.live_curves import LiveCurves, tag_of
from msprobe_megatron.run_directory.encoders.png import heat_map, png
from tests.jobs.watch.test_watch import query
from tests.unit.job.features.alerts.steps import row, step
from tests.unit.report.test_export import fields


def events(data):
    """(step, tag, scalar or picture) of an event file, by hand."""
    at, found = 0, []
    while at < len(data):
        (size,) = struct.unpack("<Q", data[at : at + 8])
        event = dict(fields(data[at + 12 : at + 12 + size]))
        at += size + 16
        for _, value in fields(event[5]) if 5 in event else ():
            entry = dict(fields(value))
            found.append((event.get(2, 0), entry[1].decode(), entry.get(2, entry.get(4))))
    return found


def test_event_file_of_a_job(watched):
    [path] = (watched / "tensorboard" / "rank_00001").glob("events.out.tfevents.*.msprobe")
    found = {(number, tag): value for number, tag, value in events(path.read_bytes())}
    assert {number for number, _ in found} == set(range(16))
    squares = query(
        watched,
        "select sum(sumsq) from ROWS where rank = 1 and step = 3 and kind = 'activation'"
        " and name = 'decoder.layers.1.mlp' and io = 'output' and path = '0'",
    )
    assert found[3, "layer_001/mlp output.0 activation"] == pytest.approx(np.sqrt(squares[0][0]), rel=1e-6)
    assert (3, "layer_002/mlp.linear_fc1.weight grad_reduced") in found
    assert (3, "embedding/word_embeddings.weight grad_reduced") in found
    assert found[3, "all layers/grad_reduced layer_002"] > found[3, "layer_002/mlp.linear_fc1.weight grad_reduced"]
    assert found[3, "loss/grad_norm"] > 0
    pictures = [value for (_, tag), value in found.items() if tag.startswith("heat map/")]
    assert len(pictures) == 2
    assert all(dict(fields(picture))[4].startswith(b"\x89PNG") for picture in pictures)


def test_tensorboard_itself_reads_it(watched):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(watched / "tensorboard" / "rank_00000"), size_guidance={"images": 0})
    found.Reload()
    assert len(found.Scalars("loss/grad_norm")) == 16
    assert found.Tags()["images"]


@pytest.mark.parametrize(
    ("what", "tag"),
    [
        (row("decoder.layers.12.mlp.linear_fc1.weight", kind="grad_reduced", io="weight"),
         "layer_012/mlp.linear_fc1.weight grad_reduced"),
        (row("decoder.layers.3", io="output", path="0"), "layer_003/whole output.0 activation"),
        (row("embedding", io="output"), "embedding/embedding output activation"),
        (row("lm loss", kind="loss", io="output", path="1"), "loss/lm loss output.1"),
        (row("lm loss", kind="loss", io="output", path="0"), "loss/lm loss"),
        (row("lm loss", kind="loss", io="output"), "loss/lm loss"),
        (row("learning_rate", kind="scalar", io="value"), "scalar/learning_rate"),
    ],
)  # fmt: skip
def test_tags(what, tag):
    assert tag_of(what) == tag


def read_png(data):
    """Pixels of a PNG file of ours, checksums tested."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def test_heat_map():
    pixels = heat_map(np.array([[0.0, 1.0], [np.nan, np.inf]]), cell=(2, 3))
    assert pixels.shape == (4, 6, 3)
    corners = [pixels[0, 0], pixels[0, 3], pixels[2, 0], pixels[2, 3]]
    assert [tuple(int(x) for x in corner) for corner in corners] == [
        (68, 1, 84), (253, 231, 37), (235, 235, 235), (220, 30, 30)
    ]  # fmt: skip
    assert (read_png(png(pixels)) == pixels).all()
    assert heat_map(np.full((1, 1), np.nan)).shape == (12, 6, 3)


class _Job:
    def __init__(self):
        self.watchers = []


def test_the_loss_is_drawn_as_the_log_shows_it(monkeypatch):
    """Two microbatches of 10 and 30 tokens: the sum of losses over the sum of tokens, and no curve of tokens."""
    logged = []
    fake = types.SimpleNamespace(run=object(), log=lambda told, commit: logged.append(told))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    curves = LiveCurves(_Job(), tensorboard=False)
    curves.saw(step(0, *(
        (row("lm loss", kind="loss", io="output", path=path, microbatch=number), [value])
        for number, pair in enumerate([(20.0, 10.0), (90.0, 30.0)])
        for path, value in zip("01", pair, strict=True)
    )))  # fmt: skip
    assert logged == [{"msprobe/step": 0, "msprobe/loss/lm loss": pytest.approx(110.0 / 40.0)}]


def test_wandb_gets_figures_only_when_the_job_has_a_run(monkeypatch):
    logged = []
    fake = types.SimpleNamespace(run=None, log=lambda told, commit: logged.append((told, commit)))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    curves = LiveCurves(_Job(), tensorboard=False)
    tensors = [
        (row("lm loss", kind="loss", io="output"), [3.0]),
        (row("decoder.layers.1.w", kind="grad_reduced"), [3, 4]),
    ]
    curves.saw(step(4, *tensors))
    assert logged == []
    fake.run = object()
    curves.saw(step(5, *tensors))
    [(told, commit)] = logged
    assert commit is False
    assert told == {"msprobe/step": 5, "msprobe/loss/lm loss": 3.0, "msprobe/layer_001/grad_reduced norm": 5.0}

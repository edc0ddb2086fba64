"""compile, export, ONNX and trace in eval record plain operations and give plain's values."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from dense_runs import at_level, network

X = (2, 3, 32, 32)


def eval_model(level="layer", **keywords):
    return at_level(network(small_inputs=False, **keywords), level).float().eval()


@pytest.fixture
def expected():
    torch.manual_seed(1)
    x = torch.randn(X)
    with torch.no_grad():
        return x, eval_model("none")(x)


@pytest.mark.parametrize("level", ["pointwise", "block"])
def test_compile(expected, level):
    x, y = expected
    torch._dynamo.reset()
    compiled = torch.compile(eval_model(level), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), y, rtol=1e-5, atol=1e-5)


def test_compile_in_training():
    """The gradients are plain's; the memory is the compiler's business."""
    torch._dynamo.reset()
    x = torch.randn(X)

    def gradients(wrap, level):
        model = eval_model(level).train()
        wrap(model)(x).square().sum().backward()
        return [p.grad for p in model.parameters()]

    compiled = gradients(lambda m: torch.compile(m, backend="aot_eager"), "layer")
    for ours, plain in zip(compiled, gradients(lambda m: m, "none"), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-3 * max(1.0, plain.abs().max().item()))


def test_export(expected):
    x, y = expected
    program = torch.export.export(eval_model(), (x,))
    assert not [node for node in program.graph.nodes if "Segment" in str(node.target)]
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), y, rtol=1e-5, atol=1e-5)


def test_trace(expected):
    x, y = expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trace is deprecated, and warns of the check of the image's size
        traced = torch.jit.trace(eval_model(), x)
        buffer = io.BytesIO()
        torch.jit.save(traced, buffer)
        buffer.seek(0)
        loaded = torch.jit.load(buffer)
    other = torch.cat([x, x.flip(0)])
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), y, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loaded(other), torch.cat([y, y.flip(0)]), rtol=1e-5, atol=1e-5)


def test_onnx(expected):
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    x, y = expected
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        torch.onnx.export(eval_model(), (x,), dynamo=True, verbose=False).save(buffer)
    model = onnx.load_from_string(buffer.getvalue())
    (found,) = reference.ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), y, rtol=1e-4, atol=1e-4)


def test_functional_transforms_run_plain():
    model = eval_model()
    x = torch.randn(X)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    found = torch.func.grad(loss)(parameters)
    plain = eval_model("none")
    plain(x).square().sum().backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-4 * p.grad.abs().max().item())

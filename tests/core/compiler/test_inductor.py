"""Inductor as a maker of kernels: what it is asked, what it says about its kernels, and what its failures become."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from nimble_core.compiler.inductor import _kernels_that_wait, compile_graph, source_nodes
from nimble_core.compiler.to_fx import lift
from nimble_core.runtime.fake import FakeDevice
from nimble_core.tracing.kernel_launches import waits_first
from nimble_core.tracing.recorded import Recorded, Stopwatch, check_inputs, record_static
from nimble_core.tracing.recording import Recording
from nimble_core.utils.errors import CaptureError
from tests.support.fused_models import made

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


def recorded(name: str) -> tuple[Recorded, torch.Tensor]:
    model, draw = made(name)
    x = draw()
    signature = check_inputs(model, (x,), {})
    return record_static(FakeDevice(), model, signature, strict=True, step=Stopwatch()), x


def graph(recording: Recording) -> fx.GraphModule:
    return lift(recording)


LINES = ["xoffset = tl.program_id(0) * XBLOCK", "tmp0 = tl.load(in_ptr0 + (x0), xmask)", "tmp1 = tmp0 + 1.0"]


@given(st.lists(st.sampled_from([*LINES, "wait", "    wait", "trigger"]), max_size=12))
def test_kernels_wait_before_all_else_and_trigger_last(lines: list[str]) -> None:
    from torch._inductor.codegen.triton import TritonKernel

    wait, trigger = TritonKernel.GDC_WAIT, TritonKernel.GDC_LAUNCH
    kernel = SimpleNamespace(GDC_WAIT=wait, GDC_LAUNCH=trigger, _enable_pdl_codegen=lambda: True)
    given_ = [line.replace("wait", wait).replace("trigger", trigger) for line in lines]
    code = SimpleNamespace(_lines=list(given_))
    before = dict(vars(TritonKernel))
    with _kernels_that_wait() as options:
        assert options == {"triton.enable_pdl": True}
        TritonKernel._filter_pdl(kernel, code)
        assert TritonKernel._handle_pdl_before_access(kernel, code, "in_ptr0") is None
        assert TritonKernel.triton_meta_common()["launch_pdl"] is False
        plain = SimpleNamespace(_lines=list(LINES))
        TritonKernel._filter_pdl(SimpleNamespace(_enable_pdl_codegen=lambda: False), plain)
        assert plain._lines == LINES
    assert dict(vars(TritonKernel)) == before
    assert code._lines[0] == wait
    assert wait not in "".join(code._lines[1:])
    done = [line for line in code._lines[1:] if line != trigger]
    assert done == [line for line in given_ if line.strip() not in (wait, trigger)]
    assert code._lines.count(trigger) == (trigger in given_)
    assert waits_first(
        "\n".join(["def triton_(in_ptr0, xnumel, XBLOCK : tl.constexpr):", "    xnumel = 8", *code._lines])
    )


@pytest.fixture(scope="module")
def compiled() -> tuple[Recorded, fx.GraphModule, Any, torch.Tensor]:
    found, x = recorded("perceptron")
    module = graph(found.recording)
    return found, module, compile_graph(module, [x]), x


@torch.no_grad()
def test_a_graph_is_compiled_and_its_attributes_stay_live(compiled: Any) -> None:
    found, _, run, x = compiled
    torch.testing.assert_close(run(x)[0], found.model(x))
    weight = found.model[0].weight
    kept = weight.clone()
    weight.mul_(-1)
    torch.testing.assert_close(run(x)[0], found.model(x))
    weight.copy_(kept)


def test_no_buffer_is_used_twice(compiled: Any) -> None:
    """Else the kernels would have hazards that the model does not have."""
    from torch._inductor.codecache import PyCodeCache

    module = PyCodeCache.modules[-1]
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert "# reuse" not in text
    assert "in_out_ptr" not in text


def test_what_was_compiled_before_comes_from_disk_under_its_own_names(compiled: Any) -> None:
    from torch._dynamo.utils import counters

    found, module, _, x = compiled
    counters.clear()
    torch.testing.assert_close(compile_graph(module, [x])(x)[0], found.model(x))
    assert (counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]) == (1, 0)
    other = graph(found.recording)
    for node in other.graph.nodes:
        if node.op == "call_function":
            node._rename(f"{node.name}_{uuid4().hex}")
    other.recompile()
    compile_graph(other, [x])
    assert counters["inductor"]["fxgraph_cache_miss"] == 1, "comments name nodes, and these have other names"


def test_inductor_itself_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppScheduling

    comment, before = CppScheduling.codegen_comment, (config.allow_buffer_reuse, config.comment_origin)
    inside: list[bool] = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        inside.append(CppScheduling.codegen_comment is comment)
        raise RuntimeError("no")

    monkeypatch.setattr(torch._inductor, "compile", fails)
    with pytest.raises(CaptureError):
        compile_graph(fx.symbolic_trace(torch.nn.Identity()), [torch.ones(1)])
    assert inside == [False]
    assert CppScheduling.codegen_comment is comment
    assert (config.allow_buffer_reuse, config.comment_origin) == before


CODE = """\
kernel = 1
def call(args):
    arg0, arg1 = args
    first.run(arg0, stream=stream0)
    # Topologically Sorted Source Nodes: [eager_call_0, t_default, eager_call_2], Original ATen: [aten.mm]
    # Original ATen: [aten.mm]
    second.run(arg0, 4, stream=stream0)
    buf1 = empty_strided_cuda((2, 3), (3, 1))
    # Source Nodes: [], Original ATen: []
    third.run(arg0, stream=stream0)
    # Topologically Sorted Source Nodes: [ eager_call_5 ], Original ATen: [aten.mm]
    buf2 = torch.ops.aten.mm.default(
        arg0, arg1)
    cpp_fused_relu_0(buf2, buf3)
    # Source Nodes: [eager_call_7], Original ATen: [aten.relu]
    cpp_fused_relu_1(buf2, buf3)
    extern_kernels.mm(buf2, buf3, out=buf4)
    return (buf4, )
"""


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (4, ()),
        (7, ("eager_call_0", "t_default", "eager_call_2")),
        (10, ()),
        (12, ("eager_call_5",)),
        (14, ()),
        (16, ("eager_call_7",)),
        (17, ()),
    ],
)
def test_the_comment_above_a_launch_is_its_own(line: int, names: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "generated.py"
    file.write_text(CODE, encoding="utf-8")
    assert source_nodes(str(file), line) == names

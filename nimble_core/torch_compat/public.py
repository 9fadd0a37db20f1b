"""Public names of torch that we replace for the whole process at times."""

from __future__ import annotations

from nimble_core.torch_compat.private import Private, private

__all__ = ["GRAPH_REPLAY", "IS_CAPTURING", "READS_TO_CHECK", "TENSOR_METHODS"]

IS_CAPTURING = private(
    "torch.cuda:is_current_stream_capturing",
    "tell libraries on the recording thread whether a capture is under way",
)
GRAPH_REPLAY = private("torch.cuda:CUDAGraph.replay", "hold replays back while CUPTI comes and goes")
TENSOR_METHODS: dict[str, Private] = {
    name: private(f"torch:Tensor.{name}", purpose)
    for name, purpose in (
        ("numpy", "notice memory that a model hands out"),
        ("__dlpack__", "notice memory that a model hands out"),
        ("tolist", "notice numbers that a model reads on the host"),
        ("__format__", "give texts a placeholder for values of a recording"),
        ("__repr__", "give texts a placeholder for values of a recording"),
    )
}
READS_TO_CHECK: dict[str, Private] = {
    name: private(f"{module}:{name}", "check values without reading them", "models that check values are refused")
    for module, name in (("torch", "_check_tensor_all_with"), ("torch.nn.functional", "one_hot"))
}

from __future__ import annotations

import pytest

from nimble_core.profiling.kernel_names import demangle, short_kernel_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("triton_poi_fused_relu_0", "triton_poi_fused_relu_0"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)",
            "vectorized_elementwise_kernel",
        ),
        ("void (anonymous namespace)::elementwise_kernel_with_index<int, f>(int)", "elementwise_kernel_with_index"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm>(cutlass_80::Params)", "Kernel2"),
        ("_ZN2at6native13reduce_kernelILi512EEEvi", "reduce_kernel"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("Memset (Device)", "Memset"),
        ("void f<(a)1>(int)", "f"),
        ("", ""),
        ("_Znonsense", "_Znonsense"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_kernel_name(name) == short


def test_demangling() -> None:
    assert demangle("_ZN2at6native4copyEv") in ("at::native::copy()", "_ZN2at6native4copyEv")
    assert demangle("plain") == "plain"


@pytest.mark.parametrize("name", ["a<b", "a>b", "operator<", "a<<<b>>>", "(", "::", "void "])
def test_odd_names_still_have_a_name(name: str) -> None:
    assert short_kernel_name(name).strip()

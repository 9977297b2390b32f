"""The device that a process computes on: looked for, and set so that the same work gives the same bits.

Light: torch is imported when a GPU is looked for. It does not deal with models.
"""

from shoal.errors import ConfigError

AUTO, CPU, CUDA, MPS = DEVICES = ("auto", "cpu", "cuda", "mps")
"""As `--device` and the run file name them. mps is the GPU of a Mac."""


def demand_device(asked: str) -> None:
    """Raise `ConfigError` if a GPU is asked for by its name and torch finds none."""
    if asked in (AUTO, CPU):
        return
    import torch

    is_there = torch.cuda.is_available() if asked == CUDA else torch.backends.mps.is_available()
    if not is_there:
        raise ConfigError(
            f"device {asked}: torch {torch.__version__} finds none on this machine. Choose cpu, or install the GPU's "
            "driver and a build of torch for it"
        )


def take_device(asked: str) -> str:
    """The device of this process: `cpu`, `cuda` or `mps`. `auto` is CUDA if torch finds it, else the CPU.

    Raises as `demand_device`.
    """
    demand_device(asked)
    if asked == CPU:
        return CPU
    import torch

    if asked == AUTO:
        asked = CUDA if torch.cuda.is_available() else CPU
    if asked == CUDA:
        _repeat_bits()
    return asked


def _repeat_bits() -> None:
    """CUDA gives the same work the same bits only on request, and may round float32 products to TF32."""
    import torch

    from shoal.config import repeatable_cuda  # late, so that the command line stays quick

    repeatable_cuda()
    torch.use_deterministic_algorithms(True)
    # Otherwise it fills each new tensor, which we write before we read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

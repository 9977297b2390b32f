"""What leaves a device comes back with the same bits, as the same tensors, and nothing is forgotten there."""

import gc

import pytest
import torch
from torch import Tensor, nn

from shoal.models import cpu_offload
from shoal.models.cpu_offload import Parked, storages_in


def test_tensors_come_back_with_their_bits_views_and_ties() -> None:
    embedding = nn.Embedding(5, 4)
    head = nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    odd = torch.tensor([float("nan"), -0.0, float("inf")])
    row_4, kept, before = embedding.weight.data[2], Parked(), [embedding.weight.detach().clone(), odd.clone()]
    kept.park({"modules": [embedding, head]}, (odd,), device="cpu")
    assert kept and not embedding.weight.untyped_storage().nbytes() and not odd.untyped_storage().nbytes()
    kept.come_back()
    assert not kept and head.weight is embedding.weight
    for one, other in zip([embedding.weight.detach(), odd], before, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    row_4.fill_(7.0)
    assert torch.equal(embedding.weight[2], torch.full((4,), 7.0))


def test_a_park_that_finds_no_memory_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((4,), float(i)) for i in range(3)]
    usual, kept = torch.empty, Parked()
    sizes: list[int] = []

    def scarce(*shape, **named):
        sizes.append(1)
        if len(sizes) == 5:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return usual(*shape, **named)

    monkeypatch.setattr(cpu_offload.torch, "empty", scarce)
    with pytest.raises(RuntimeError, match="can't allocate"):
        kept.park(tensors, device="cpu")
    monkeypatch.undo()
    kept.come_back()
    assert [tensor.tolist() for tensor in tensors] == [[float(i)] * 4 for i in range(3)]


def test_memory_that_the_driver_still_has_to_free_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed leaves its memory on a GPU for a moment after its lock is free."""
    tensor, waits = torch.arange(4.0), list[float]()
    kept = Parked(sleep=waits.append)
    kept.park(tensor, device="cpu")
    storage, parked = kept._kept[0]

    class Full:
        """Storage of a device that is full for two attempts."""

        def resize_(self, size: int) -> None:
            if len(waits) < 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            storage.resize_(size)

    monkeypatch.setattr(cpu_offload, "_bytes_of", lambda full: torch.empty(0, dtype=torch.uint8).set_(storage))
    kept._kept[0] = (Full(), parked)  # type: ignore[assignment]
    kept.come_back()
    assert len(waits) == 2 and tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_memory_that_stays_full_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Parked(sleep=lambda seconds: None)

    class Full:
        def resize_(self, size: int) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cpu_offload, "GONE_S", -1.0)
    kept._kept = [(Full(), torch.empty(4, dtype=torch.uint8))]  # type: ignore[list-item]
    with pytest.raises(torch.OutOfMemoryError):
        kept.come_back()


def test_files_that_are_mapped_and_other_devices_are_left_alone() -> None:
    mapped = torch.from_numpy(torch.zeros(4).numpy())
    assert not list(storages_in([mapped, torch.zeros(4, device="meta")], "cpu"))


def all_on(device: str) -> dict[int, Tensor]:
    """Every tensor of this process there, by its memory."""
    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and one.device.type == device]
    return {one.untyped_storage()._cdata: one for one in found if one.untyped_storage().nbytes()}

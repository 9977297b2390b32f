"""The cheapest way to a version: whole, or by patches from what is here, with as few manifests as the choice needs."""

import random

import pytest

from shoal.protocol.constants import MAX_PATCH_CHAIN
from shoal.protocol.messages import FileEntry, Manifest, Patch
from shoal.weights.delta.patch import APPLY_SHARE, DownloadPlan, NeedsManifest, plan_download

FULL, SMALL = 1_000_000, 7_000


def root(version: int) -> str:
    return f"{version:064x}"


def manifest(version: int, bases: dict[int, int] | None = None, whole: bool = True, **fields: str) -> Manifest:
    """A version with patches of these sizes from these bases; from the one before by default."""
    if bases is None:
        bases = {version - 1: SMALL} if version else {}
    files = (FileEntry("config.json", 0, root(0), ()),)
    files += (FileEntry("model.safetensors", FULL, root(0), ()),) if whole else ()
    patches = tuple(
        Patch(
            base, fields.get("base_root", root(base)), fields.get("codec", "gaps-1"), FileEntry("p.patch", size, "", ())
        )
        for base, size in bases.items()
    )
    return Manifest(
        run="r", stream="policy", version=version, parents=(), dtype="bfloat16", root=root(version), files=files,
        chunk_bytes=1000, issued=0.0, expires=0.0, patches=patches,
    )  # fmt: skip


def found(
    asked: Manifest, here: list[int], served: list[Manifest], **options: object
) -> tuple[DownloadPlan | None, list[int]]:
    """The way, and the manifests that had to be fetched for it."""
    known: dict[int, Manifest | None] = {}
    roots = {version: root(version) for version in here}
    while isinstance(way := plan_download(asked, roots, known, weights_bytes=FULL, **options), NeedsManifest):  # type: ignore[arg-type]
        known[way.version] = {one.version: one for one in served}.get(way.version)
    return way, list(known)


def versions_of(way: DownloadPlan | None) -> list[int]:
    assert way is not None
    return [way.start, *(hop.version for hop in way.hops)]


SERVED = [manifest(version) for version in range(20)]


def test_a_node_with_the_version_before_takes_one_patch_and_needs_no_other_manifest():
    way, asked = found(manifest(9), [8], SERVED)
    assert versions_of(way) == [8, 9] and way.is_here and asked == []


def test_a_node_that_is_some_versions_behind_takes_a_chain():
    way, asked = found(manifest(9), [2, 5], SERVED)
    assert versions_of(way) == [5, 6, 7, 8, 9] and asked == [8, 7, 6]
    assert way.cost_bytes == 4 * (SMALL + APPLY_SHARE * FULL)


def test_a_newcomer_takes_the_whole_version_and_asks_for_no_other_manifest():
    way, asked = found(manifest(9), [], SERVED)
    assert versions_of(way) == [9] and not way.is_here and asked == []


def test_a_node_that_is_far_behind_takes_the_whole_version():
    far = manifest(50, {49: FULL // 3})
    way, asked = found(far, [10], [manifest(version, {version - 1: FULL // 3}) for version in range(50)])
    assert versions_of(way) == [50] and not way.is_here and len(asked) <= 3


def test_a_newcomer_begins_at_the_newest_whole_version_where_the_asked_one_has_none():
    served = [manifest(version, whole=version % 4 == 0) for version in range(20)]
    way, asked = found(served[11], [], served)
    assert versions_of(way) == [8, 9, 10, 11] and not way.is_here and asked == [10, 9, 8]


def test_of_two_patches_the_one_with_the_cheaper_way_is_taken():
    skipping = manifest(9, {8: SMALL, 5: 3 * SMALL})
    assert versions_of(found(skipping, [5], SERVED)[0]) == [5, 9]
    assert versions_of(found(skipping, [5, 8], SERVED)[0]) == [8, 9]


def test_a_version_that_is_here_with_another_root_is_no_base():
    way = plan_download(manifest(9), {8: root(77)}, {8: None}, weights_bytes=FULL)
    assert isinstance(way, DownloadPlan) and versions_of(way) == [9]


def test_a_manifest_with_another_root_than_the_patch_begins_at_is_not_followed():
    other = manifest(8, base_root=root(8))
    assert versions_of(found(manifest(9, base_root=root(77)), [7], [other])[0]) == [9]
    assert found(manifest(9, whole=False, base_root=root(77)), [7], [other])[0] is None


def test_an_unknown_codec_is_left_out():
    assert versions_of(found(manifest(9, codec="other-2"), [8], SERVED)[0]) == [9]


def test_a_broken_patch_is_not_taken_again():
    assert versions_of(found(manifest(9), [8], SERVED, broken={(8, 9)})[0]) == [9]


def test_without_a_manifest_in_between_the_whole_version_is_taken():
    assert versions_of(found(manifest(9), [2], [])[0]) == [9]
    assert found(manifest(9, whole=False), [2], [])[0] is None


def test_a_chain_has_a_bound():
    served = [manifest(version, whole=version == 0) for version in range(MAX_PATCH_CHAIN + 2)]
    assert len(versions_of(found(served[MAX_PATCH_CHAIN], [], served)[0])) == MAX_PATCH_CHAIN + 1
    assert found(served[MAX_PATCH_CHAIN + 1], [], served)[0] is None


@pytest.mark.parametrize("seed", range(30))
def test_the_way_is_as_cheap_as_the_cheapest_of_all(seed):
    rng = random.Random(seed)
    served = []
    for version in range(10):
        bases = {base: rng.randrange(1, FULL // 4) for base in range(version) if rng.random() < 0.5}
        served.append(manifest(version, bases, whole=version == 0 or rng.random() < 0.3))
    here = [version for version in range(9) if rng.random() < 0.3]

    def cost(version: int) -> float:
        if version in here and version != 9:
            return 0.0
        one = served[version]
        ways = [cost(p.base) + p.file.size + APPLY_SHARE * FULL for p in one.patches]
        ways += [FULL] if len(one.files) > 1 else []
        return min(ways, default=float("inf"))

    way, _ = found(served[9], here, served)
    assert (way.cost_bytes if way else float("inf")) == pytest.approx(cost(9))

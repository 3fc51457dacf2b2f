"""Work that needs hardware instead of a device: who takes it, in which order, and what it holds, on every backend."""

from batchwright.client.documents.states import State
from batchwright.client.documents.workers import ServedDevice
from batchwright.schemas.results import DeviceInfo
from batchwright_service.domain.hardware import ANY_DEVICE, HardwareNeed
from batchwright_service.store.models import Beat, Binding, Ending, NewWork
from batchwright_service.store.store import Store
from tests.support.factories import probe_result
from tests.support.service.scripted import SERVED, new_work
from tests.support.service.stores import LEASE_SECONDS, NewId, claimed

GIB = 1024**3
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"


def card(host: str, index: int = 0, name: str = H100) -> ServedDevice:
    """A card of a host, whose memory is in its name."""
    memory = (80 if "80GB" in name else 40) * GIB
    device = DeviceInfo(id=f"cuda:{index}", kind="cuda", name=name, total_bytes=memory)
    return SERVED.model_copy(update={"slot": f"{host}/cuda:{index}", "owner": f"{host}:scope:1", "device": device})


def needing(new_id: NewId, **need: object) -> NewWork:
    """Work that needs hardware."""
    return new_work(new_id("tun"), device=ANY_DEVICE, hardware=HardwareNeed.model_validate(need).lane)


def announce(store: Store, *devices: ServedDevice) -> None:
    """Announce devices by a heartbeat, as their processes do."""
    store.devices.beat(Beat(LEASE_SECONDS, devices=devices, changed=frozenset(served.slot for served in devices)))


def test_any_worker_with_the_hardware_takes_the_work(store: Store, new_id: NewId) -> None:
    """A card's index and host do not matter; its catalogue name, product and memory do, and a processor is no card."""
    for need in ({"gpu": "H100-80GB"}, {"product": "*H100*"}, {"min_memory_bytes": 60 * GIB}):
        work = store.submissions.add(needing(new_id, **need)).id
        assert store.leases.claim(card("old", 0, A100), LEASE_SECONDS) is None
        assert store.leases.claim(SERVED, LEASE_SECONDS) is None
        claim = claimed(store, card("new", 3))
        assert (claim.item.id, claim.item.slot) == (work, "new/cuda:3")
        store.leases.finish(claim.lease, Ending(State.FAILED))


def test_lanes_share_one_order(store: Store, new_id: NewId) -> None:
    """A worker takes work for its device and of every lane that it has, by priority, turns and age."""
    served = card("host")
    key = "a" * 16
    items = [
        needing(new_id, gpu="H100-80GB"),
        new_work(new_id("tun"), device="cuda:0"),
        needing(new_id, product="NVIDIA*"),
        new_work(new_id("tun"), device="cuda:0", hardware=served.hardware),
        new_work(new_id("tun"), device=ANY_DEVICE, hardware=HardwareNeed(gpu="H100-80GB").lane, key_id=key),
        new_work(new_id("tun"), device=ANY_DEVICE, hardware=HardwareNeed(gpu="H100-80GB").lane, priority=5),
        needing(new_id, gpu="A100-40GB"),
    ]
    ids = [store.submissions.add(work).id for work in items]
    taken = []
    while (claim := store.leases.claim(served, LEASE_SECONDS)) is not None:
        taken.append(claim.item.id)
        store.leases.finish(claim.lease, Ending(State.FAILED))
    assert taken == [ids[5], ids[4], *ids[:4]]
    assert [depth.lane for depth in store.queue.depths()] == [items[6].hardware]
    assert [(entry.id, entry.position) for entry in store.queue.waiting(9)] == [(ids[6], 1)]


def test_the_first_probe_binds_a_tuning_to_its_hardware(store: Store, new_id: NewId) -> None:
    """Handed back before a probe, any card may go on; afterwards only an equal one, wherever it is."""
    work = store.submissions.add(needing(new_id, product="NVIDIA*")).id
    store.leases.hand_back(claimed(store, card("old", 0, A100)).lease)
    claim = claimed(store, card("new"), lease_seconds=LEASE_SECONDS)
    lane = HardwareNeed.of_kind(card("new").device, 1).lane
    binding = Binding(lane, fingerprint="f", request_fingerprint="r")
    store.evidence.record_probe(claim.lease, 1, probe_result(4), binding)
    store.leases.hand_back(claim.lease)
    assert store.leases.claim(card("old", 0, A100), LEASE_SECONDS) is None
    claim = claimed(store, card("another", 7))
    assert (claim.item.id, claim.item.fingerprint) == (work, "f")


def test_abandoned_work_is_taken_over_by_equal_hardware(store: Store, new_id: NewId) -> None:
    """Another host's equal card goes on with what a vanished worker left, and an unlike one does not."""
    work = store.submissions.add(needing(new_id, gpu="H100-80GB")).id
    claimed(store, card("gone"), lease_seconds=0.0)
    assert store.leases.claim(card("old", 0, A100), LEASE_SECONDS) is None
    claim = claimed(store, card("new"))
    assert (claim.item.id, claim.lost_leases) == (work, 1)


def test_a_heartbeat_finds_work_of_its_lanes(store: Store, new_id: NewId) -> None:
    """Of idle devices, those that have the hardware are wanted; the list of devices counts the work too."""
    new, old = card("new"), card("old", 0, A100)
    announce(store, new, old)
    store.submissions.add(needing(new_id, gpu="H100-80GB"))
    assert store.devices.beat(Beat(LEASE_SECONDS, idle=(new, old))).wanted == {new.slot}
    assert {device.served.slot: device.queued for device in store.devices.list()} == {new.slot: 1, old.slot: 0}


def test_several_devices_are_taken_together_or_not_at_all(store: Store, new_id: NewId) -> None:
    """Two works of two cards on a host of three never hold one each, and smaller work does not overtake the first."""
    cards = [card("host", index) for index in range(3)]
    announce(store, *cards, card("small"))
    single = store.submissions.add(needing(new_id, gpu="H100-80GB")).id
    busy = claimed(store, cards[1])
    assert busy.item.id == single
    pairs = [store.submissions.add(needing(new_id, gpu="H100-80GB", devices_per_node=2)).id for _ in range(2)]
    late = store.submissions.add(needing(new_id, gpu="H100-80GB")).id
    first = claimed(store, cards[2])
    assert (first.item.id, first.other_slots) == (pairs[0], ("host/cuda:0",))
    assert {device.served.slot: device.running_id for device in store.devices.list()} == {
        "host/cuda:0": pairs[0],
        "host/cuda:1": single,
        "host/cuda:2": pairs[0],
        "small/cuda:0": None,
    }
    assert all(store.leases.claim(served, LEASE_SECONDS) is None for served in cards)
    assert claimed(store, card("small")).item.id == late, "a host with too few cards does not wait for more"
    store.leases.finish(busy.lease, Ending(State.FAILED))
    assert store.leases.claim(cards[1], LEASE_SECONDS) is None, "one card is free, two are needed"
    store.leases.finish(first.lease, Ending(State.FAILED))
    second = claimed(store, cards[0])
    assert (second.item.id, second.other_slots) == (pairs[1], ("host/cuda:1",))


def test_work_over_hosts_is_for_a_cluster(store: Store, new_id: NewId) -> None:
    """Workers of hosts leave such work, and take what comes after it; the worker that an engine starts takes it."""
    cards = [card("one", 0), card("two", 0)]
    announce(store, *cards)
    over_hosts = HardwareNeed(gpu="H100-80GB", nodes=2)
    assert over_hosts.in_words == "2 hosts with H100-80GB each"
    wide = store.submissions.add(new_work(new_id("job"), device=ANY_DEVICE, hardware=over_hosts.lane)).id
    single = store.submissions.add(needing(new_id, gpu="H100-80GB")).id
    assert claimed(store, cards[0]).item.id == single
    assert store.leases.claim(cards[1], LEASE_SECONDS) is None
    claim = store.leases.claim_work(wide, cards[1], LEASE_SECONDS)
    assert claim is not None
    assert claim.item.id == wide


def test_a_takeover_of_several_devices_holds_as_many(store: Store, new_id: NewId) -> None:
    """The slots of a vanished owner are not free for others until its work has them again, or is queued."""
    cards = [card("host", index) for index in range(2)]
    announce(store, *cards)
    pair = store.submissions.add(needing(new_id, gpu="H100-80GB", devices_per_node=2)).id
    single = store.submissions.add(needing(new_id, gpu="H100-80GB")).id
    claimed(store, cards[0], lease_seconds=0.0)
    again = claimed(store, cards[1])
    assert (again.item.id, again.other_slots) == (pair, ("host/cuda:0",))
    store.leases.finish(again.lease, Ending(State.SUCCEEDED))
    assert claimed(store, cards[0]).item.id == single

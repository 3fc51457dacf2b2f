"""Turns of messages: what is late gets few threads, and what is prompt goes first."""

from batchwright_service.store.outbox.deliveries import DueDelivery, LeasedDelivery
from batchwright_service.webhooks.deliverer import THREADS, Turns, host_of


def due(number: int, host: str, webhook: str = "") -> DueDelivery:
    """A message to a host."""
    return DueDelivery(f"msg_{host}_{webhook}_{number}", webhook or f"whk_{host}", f"https://{host}/told")


def leased(message: DueDelivery) -> LeasedDelivery:
    """The message under a lease."""
    return LeasedDelivery(
        message.id, message.webhook_id, message.url, ("secret",), "{}", attempt=1, now=0.0, age_seconds=0.0
    )


def known(turns: Turns, host: str, seconds: float, *, answered: bool = True) -> None:
    """Make an attempt at a host."""
    message = leased(due(0, host))
    turns.begin(message)
    turns.end(message, answered=answered, seconds=seconds)


def test_late_hosts_leave_threads_to_others() -> None:
    """Many that answered late or not at all hold four threads, new ones 24 with them, prompt ones all."""
    turns = Turns()
    for index in range(40):
        known(turns, f"late{index}", 9.0)
        known(turns, f"away{index}", 0.1, answered=False)
        known(turns, f"prompt{index}", 0.1)
    late = [due(1, f"{name}{index}") for name in ("late", "away") for index in range(40)]
    new = [due(1, f"new{index}") for index in range(40)]
    prompt = [due(1, f"prompt{index}") for index in range(40)]
    assert len(turns.choose(late)) == 4
    assert len(turns.choose([*late, *new])) == 24
    assert turns.choose([*late, *new, *prompt]) == [message.id for message in prompt[:THREADS]]
    for message in late[:4]:
        turns.begin(leased(message))
    for message in new[:20]:
        turns.begin(leased(message))
    assert turns.choose([*late[4:], *new[20:]]) == []
    assert len(turns.choose([*late[4:], *new[20:], *prompt])) == turns.free == 8


def test_webhooks_of_one_host_share_its_threads() -> None:
    """However many webhooks and messages it has: one at once while it is unknown or late, four if prompt."""
    turns = Turns()
    messages = [due(number, "host", f"whk{webhook}") for webhook in range(5) for number in range(2)]
    for seconds, most in ((None, 1), (9.0, 1), (0.1, 4)):
        if seconds is not None:
            known(turns, "host", seconds)
        assert len(turns.choose(messages)) == most
    assert len(turns.choose([due(number, "host") for number in range(9)])) == 2


def test_a_host_has_its_port() -> None:
    """Two ports are two receivers; paths and queries do not matter."""
    assert host_of("https://Hooks.example.org:8443/a/b?c=/d") == "hooks.example.org:8443"
    assert host_of("http://[::1]:80") == "[::1]:80"
    assert host_of("https://hooks.example.org?x") == "hooks.example.org?x".partition("?")[0]

"""The longest waits in the life of a lease, in the order in which a worker meets them.

Operators set the other ones, in ``settings``: the lease itself (``lease_seconds``), the pauses between looks for work
(``poll_seconds``, ``fallback_poll_seconds``), and the time in which a run saves its state (``shutdown_grace_seconds``).
Locks of the database are waited for as in any transaction (``store.database.transactions``).
"""

SLOT_SECONDS = 5.0
"""A worker that starts waits for the end of the process that served its device before: ``worker.slot``."""
NOTIFICATION_SECONDS = 300.0
"""An idle worker waits for a notification of new work. It then asks for one anew, in case that its row was changed from
outside: ``worker.idle_pause``."""
CLAIM_SECONDS = 10.0
"""A claim waits for a place in the line for the lock of claims. A worker that is asked to stop may wait for as long:
``store.database.claim_admission``."""
ASSIGNED_CLAIM_SECONDS = 60.0
"""The claim of a process that was started for one piece of work waits for its place: it has nothing else to do."""
EQUAL_TUNING_SECONDS = 600.0
"""A claimed tuning waits for an equal one in another slot. A longer one may be stuck, and this slot would stay idle:
``worker.runner``."""
CANCEL_GRACE_SECONDS = 0.75
"""A cancelled job may save its state for so long. Together with a heartbeat that is within the documented two seconds:
``worker.lease``."""

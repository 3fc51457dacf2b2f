"""Keep webhooks, and the messages to them that are still to be delivered (a transactional outbox).

- ``endings`` writes a message for each webhook that is to be notified, in the transaction that ends the work:
  ``store.leases`` and ``store.submissions`` call it. So no message is lost, and none reports an end that was rolled
  back.
- ``deliveries`` leases messages to one deliverer at a time, records the result of each attempt, and lists them.
- ``registrations`` stores webhooks with their secrets.

A deliverer that is killed loses its lease, and the message is due again: a message is delivered at least once. Time is
the database's.

Where a new thing goes: an event, ``batchwright.client.documents.webhooks`` and ``endings``; a field of a message, the
same two.

The package may import ``store.database``, ``batchwright_service.errors`` and ``batchwright_service.domain``.
"""

"""Tell receivers over HTTP when tunings and jobs end: manage webhooks, and deliver the messages of the outbox.

The pipeline of a message, which ``batchwright_service.store.outbox`` wrote in the transaction that ended the work:

1. ``deliverer`` leases due messages, in the API's process, and has some of them sent at once: hosts that
   answer late or not at all get few threads.
2. ``receivers`` checks that the operator allows the host, and ``sending`` that every address of the host is public or
   allowed. The connection goes to a checked address, so that a second answer of DNS changes nothing.
3. ``signatures`` signs the body as Standard Webhooks say; ``sending`` posts it, in bounded time, and follows no
   redirect.
4. The result goes to the outbox: delivered, due again after a longer and longer pause, or dead.

``management`` has the use cases of administrators: register, list, rotate the secret, delete, try, and send again.

Where a new thing goes: a rule on receivers, ``receivers`` or ``sending``; a limit, beside the code that keeps it or in
``batchwright_service.settings``.

The package may import ``batchwright_service.observability``, ``batchwright_service.store`` (its interfaces) and the
layers below; no FastAPI and no SQL.
"""

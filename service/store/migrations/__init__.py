"""The history of the schema. ``service.store.migrate`` applies it; nothing imports it."""

"""The history of the schema. ``service.store.database.migrate`` applies it; nothing imports it."""

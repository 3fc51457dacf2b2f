"""Read the samples of a run, in a fixed order, and make batches of them.

``build`` turns the data part of a spec into a data set of ``sources``, each of which is a ``source.DataSource``: all
that a run asks of a kind of data. ``files`` finds the files of a spec in the folders that may be read;
``loading`` prefetches windows in workers; ``seeding`` makes the order of an epoch a function of (seed, epoch), and
random choices one of (seed, epoch, sample); ``base`` collates samples into a batch; ``foreign`` runs the parsers of
other packages, which may raise anything, crash, or never end; ``first_reading`` bounds what is read before the first
probe of a tuning.

A new kind of data is a document in ``batchwright.schemas.dataset.data_spec``, a module with a ``DataSource`` in
``sources``, and a line of ``SOURCES`` in ``build``. No other module of a run names a kind.
"""

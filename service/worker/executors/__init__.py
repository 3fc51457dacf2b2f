"""Where probes and jobs run. ``base`` is the interface; ``local`` runs processes, ``inline`` runs in this process."""

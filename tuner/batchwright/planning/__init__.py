"""Search for the largest micro-batch that fits, and derive an exact plan and a recommendation from the evidence.

Everything here is pure: no torch, no clock, no process. All state is a function of the recorded results, so a tuning
can be rebuilt from them after its process has died.

The pipeline, from the request to the recommendation, is that of ``session``, which names one of the ``steps`` after
the other; ``batchwright.driving`` runs them:

1. ``tuning_conditions`` turns the request and the device into a memory limit, the sizes worth probing and the
   fingerprints, by which equal requests share one recommendation (``search_space``, ``fingerprint``).
2. ``proofs.coupled_loss`` requests the coupling check, and has the only plan that stays exact where the loss couples
   samples.
3. ``stages`` name the next probe (ask) and take its result (tell), one stage after the other: a stored recommendation
   to confirm (``warm_start``), the search for the largest size (``search``, with the probability that a size fits from
   ``posterior``), the baseline, the timing of plans, and the plan itself.
4. ``objectives`` select the sizes to search, the plans to time and the plan to recommend.
5. ``accumulation`` splits the effective batch into micro-batches, exactly, and says which of them a probe runs.
6. ``proofs.plan_proof`` says what the probes show of the plan. Of a command ``proofs.counted_plans`` compares what was
   counted over its sizes.
7. ``recommendation`` puts plan, proof, evidence, alternatives (``plan_figures``) and ``warnings`` into the document;
   ``comparison`` adds its gain over the plan in use until now, and estimated changes of the spec.

``parameters`` has the tuned constants of all of these, each with its reason and its benchmark. ``learning`` corrects an
estimate by those of earlier tunings, where a service keeps them.

Where to add: an objective, ``objectives``; a stage, ``stages``; a what-if, ``comparison.what_if``; a warning,
``warnings``; a field of the spec that leaves memory as it is, ``fingerprint`` (every other field is part of it); a
field of the recommendation, ``batchwright.schemas.recommendation`` first.

The package may import ``schemas``, ``system`` and the modules below them, and nothing else of ``batchwright``.
"""

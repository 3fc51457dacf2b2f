"""Search for the largest micro-batch that fits, and derive an exact plan and a recommendation from the evidence.

Everything here is pure: no torch, no clock, no process. All state is a function of the recorded results, so a tuning
can be rebuilt from them after its process has died.

The pipeline, from the request to the recommendation, is that of ``session``; ``driver`` has the steps of the callers,
which run the probes:

1. ``search_space`` turns the request and the device into a memory limit and the sizes worth probing; ``objectives``
   selects the sizes that matter for the objective.
2. ``proofs.coupled_loss`` requests the coupling check, and has the only plan that stays exact where the loss couples
   samples.
3. ``warm_start`` seeds the search with a stored recommendation, if one is given; ``learning`` corrects an estimate by
   those of earlier tunings, where a service keeps them.
4. ``search`` names the next size to probe (ask) and takes its result (tell). ``posterior`` gives the probability that
   a size fits.
5. ``accumulation`` splits the effective batch into micro-batches, exactly, and says which of them a probe runs.
6. ``proofs.plan_proof`` has the plan itself run, unless a probe was at least as demanding. Of a command
   ``proofs.counted_plans`` compares what was counted over its sizes.
7. ``recommendation`` puts plan, proof, evidence and alternatives into the document; ``comparison`` adds its gain
   over the plan in use until now, and estimated changes of the spec.

``parameters`` has the tuned constants of all of these, each with its reason and its benchmark. ``fingerprint``
identifies a tuning, so that equal requests share one recommendation.

Where to add: an objective, ``objectives`` and the request in ``batchwright.schemas.requests``; a what-if,
``comparison.what_if``; a field of the spec that leaves memory as it is, ``fingerprint`` (every other field is part of
it); a field of the recommendation, ``batchwright.schemas.recommendation`` first.

The package may import ``schemas``, ``system`` and the modules below them, and nothing else of ``batchwright``.
"""

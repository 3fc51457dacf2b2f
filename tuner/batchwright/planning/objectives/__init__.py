"""The objectives of a tuning: the sizes that each searches, and the plan that it chooses. Pure, no torch.

``objective`` has the interface and what most objectives share. ``largest``, ``fewest_steps`` and ``fastest`` have one
objective each, and ``by_name`` finds that of a request.

Where a new objective goes: a module here, its line in ``by_name``, and its name in ``schemas.requests`` (`Objective`).
"""

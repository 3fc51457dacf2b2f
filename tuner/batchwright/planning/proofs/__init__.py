"""What the probes prove of the recommended plan: that it fits, and gives the effective batch. Pure, no torch.

``plan_proof`` finds the largest plan that a probe shows to fit. ``counted_plans`` compares the counted updates of a
command over the sizes of a tuning, and ``coupled_loss`` says which plans stay exact where the loss couples samples.
"""

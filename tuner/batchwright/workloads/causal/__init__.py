"""Causal language models of transformers: decoders that predict the next token.

- ``decoders`` has their workloads: the plain one, that of packed documents, and that of a mixture of experts whose
  routers are trained.
- ``document_masks`` knows the models that keep packed documents apart.
- ``preference_pairs`` has the workload of pairs of completions (DPO), and ``reference_policy`` the model that they are
  compared with.
- ``rope_scaling`` finds position embeddings that make the samples of a micro-batch depend on the longest one.
- ``routers`` reads the auxiliary loss of a mixture of experts, and refuses a config whose loss would not be trained.

Importing the package imports neither torch nor transformers.
"""

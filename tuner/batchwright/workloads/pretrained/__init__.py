"""Pretrained transformers models in the library's own format: read a config, load weights, write a result.

- ``folder_config`` reads the config of a folder into a spec, before anything is probed.
- ``hub_files`` fetches a model of the Hugging Face hub into its cache, for the others to read; ``bounded_fetch`` does
  so for a service, which no hub may stop.
- ``starting_weights`` builds a model with the weights of the folder, for a run.
- ``pretrained_output`` writes a trained model so that the library loads it.

Nothing else is downloaded, and no code of a model is run. Importing the package imports neither torch nor transformers.
"""

"""Start, monitor and stop the processes of a training run. Never imports torch, so that the service can use it.

``launcher`` runs the processes of a folder and restarts them from the newest checkpoint where ranks that share a model
ran out of memory; ``rank_processes`` holds one process per rank; ``run_directory`` has the paths and the progress file;
``checkpoint_files`` compares checkpoints with their checksums.
"""

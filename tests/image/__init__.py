"""Build the image from the unchanged Dockerfile, and check it by running it in containers.

``make image-test`` and ``make cuda-image-test`` run these tests; ``make test`` does not. They need root and Debian with
apt, and are skipped with the reason elsewhere. No Docker engine, no registry and no installation is needed:

- ``container_tools`` unpacks buildah, podman and runc from Debian's packages into a folder, and calls them.
- ``base_image`` makes a stand-in for the Python image by debootstrap, since the tests ask no registry.
- ``image_build`` builds docker/Dockerfile upon that stand-in.
- ``containers`` runs the image as the manifests do: read-only root, no capabilities, an unprivileged user, no network.

The folder (BATCHWRIGHT_TEST_IMAGES, `.venv/images` in the Makefile) takes 6 GB, and 15 GB more with the CUDA
image. It keeps layers between runs.
"""

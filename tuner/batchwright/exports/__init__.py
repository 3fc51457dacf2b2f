"""Export a recommendation as the configuration of a training framework or a launcher.

The pipeline of an export:

1. ``registry`` finds the target by name, and has ``batchwright.planning.accumulation`` make the uniform plan where the
   target repeats one micro-batch size. An export that would change the effective batch is refused unless that is
   allowed.
2. The target's module, in ``frameworks`` or ``launchers``, writes the files: from a context with the plan it
   makes files, a command, an environment and warnings.
3. ``rendering`` quotes every value by the rules of the file's format, so that no value can end its string.

``base`` has the documents and the interface of a target. ``spec_advice`` translates the spec for frameworks, and has
the warnings of the parts that an export leaves to the program. ``advice`` holds other warnings that targets share.

Where to add:

- a target: a module with a `TARGET` in ``frameworks`` or ``launchers``, and a line in ``registry``; then `python
  tests/support/exports/golden.py FORMAT` writes its golden files;
- a new version of a target: its `versions`, and a branch in its module;
- a part of a spec: its warning in ``spec_advice``, and the targets that write it or list the warning;
- an option of exports: `ExportOptions` in ``base``, and `takes` of each target that writes it.

The package may import ``planning``, ``hardware.gpu_lookup``, ``schemas`` and ``device_traits``; never torch,
and never a framework. Importing the package itself imports nothing: the SDK takes only the documents of ``base``.
"""

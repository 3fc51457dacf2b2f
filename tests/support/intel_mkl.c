/* MKL chooses its code by the make of the processor. These take the place of its two questions about the make, so that a
   processor of another make runs the code that MKL has for Intel's, with the instructions that the processor really has. */

int mkl_serv_intel_cpu(void) { return 1; }

int mkl_serv_intel_cpu_true(void) { return 1; }

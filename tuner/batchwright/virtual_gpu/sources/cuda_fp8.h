// Stands in for CUDA's header, as cuda_fp16.h does: NCCL's header only includes it.
#pragma once

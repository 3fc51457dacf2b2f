// Stands in for CUDA's header, which needs headers that no wheel of torch has: the libraries only pass pointers to this type.
#pragma once
struct __half;

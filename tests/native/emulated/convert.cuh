// ggml_cuda_cast is in cuda_emulation.h.
#pragma once

// How the graph of a DFlash draft computes its convolutions and its output: as single nodes where the device has kernels for
// them (ggml-dflash.h), else from ordinary operations.
//
// GGML_DFLASH_DRAFT_OPS in the environment, for comparison: `composite` builds everything from ordinary operations, `0` leaves
// convolution, head and selector to the base.

#pragma once

struct ggml_tensor;
struct llama_model;
struct llm_graph_context;

// One node for the convolution of `x` [n_embd, n_tokens], plus `residual` if there is one. Null where the base has to build it.
ggml_tensor * dflash_build_conv(llm_graph_context & g, ggml_tensor * x, ggml_tensor * dynamic, ggml_tensor * base, int side, ggml_tensor * residual);

// Whether `cur` is such a node that has added `residual` already.
bool dflash_has_added(const ggml_tensor * cur, const ggml_tensor * residual);

// Head and selector of a draft that has one, for the drafted positions only; the result is t_h_nextn of the graph, one row per
// token. Positions 1 to n are scored, where n is the number of outputs of the batch if any are flagged, at most block - 1. There
// are no logits to read afterwards. False, having built nothing, where the base has to.
bool dflash_build_head(llm_graph_context & g, const llama_model & model, ggml_tensor * hidden, ggml_tensor * output, ggml_tensor * output_s, ggml_tensor * tokens);

// The rows of `hidden` whose logits are wanted, for drafts whose logits are read one by one.
ggml_tensor * dflash_output_rows(llm_graph_context & g, const llama_model & model, ggml_tensor * hidden);

// One draft model attached to one target context: takes target features into the draft's memory and proposes blocks.
// llama-server (through common/dflash-speculative.h) and libdflash sessions share this class.
//
// The draft context must have been created with the target as `ctx_other` and must hold `n_seq` sequences. Positions of the
// draft equal those of the target. Errors are thrown as dflash_error.

#pragma once

#include "dflash-reject.h"

#include "llama.h"

#include <cstdint>
#include <memory>
#include <vector>

// a row of the target's latest decode whose features the draft shall take
struct dflash_feature_row {
    int32_t      i_batch; // row in the batch of that decode
    llama_pos    pos;
    llama_seq_id seq_id;
};

// one block to draft
struct dflash_request {
    llama_seq_id seq_id = 0;
    llama_pos    pos    = 0;               // position of the anchor
    llama_token  anchor = LLAMA_TOKEN_NULL; // last token of the text, not yet decoded by the target
    int32_t      n_max  = 0;               // tokens wanted, 1 .. block - 1

    // for verification by rejection: shape the candidates by this chain and note their distribution; null = plain greedy
    llama_sampler * chain  = nullptr;
    dflash_rng    * rng    = nullptr;
    bool            greedy = false;        // take the likeliest candidate instead of drawing

    std::vector<llama_token> tokens;       // out: the proposal, n_max tokens or fewer, empty if the draft failed
    std::vector<dflash_q_row> q;           // out, with a chain: one row per token
    bool                     invalid = false; // out: the draft model gave no usable token (NaN, id out of range)
};

// what the selector saw in the latest round; only filled when tracing
struct dflash_trace_data {
    int32_t     n_pos   = 0;
    int32_t     n_top_k = 0;
    int32_t     n_embd  = 0;
    int32_t     n_vocab = 0;
    llama_pos   pos     = 0;
    llama_token anchor  = LLAMA_TOKEN_NULL;

    std::vector<llama_token> draft;
    std::vector<llama_token> candidates; // [n_pos][n_top_k]
    std::vector<float>       scores;     // [n_pos][n_top_k]
    std::vector<float>       lattice;    // [n_pos][n_top_k][n_top_k]
    std::vector<float>       hidden;     // [n_pos][n_embd]
    std::vector<float>       logits;     // [n_pos][n_vocab]
};

// collects named tensors of a draft graph through the scheduler's eval callback; must outlive the draft context
struct dflash_tap {
    std::vector<float> hidden;
    std::vector<float> logits;

    static bool callback(struct ggml_tensor * t, bool ask, void * user_data); // ggml_backend_sched_eval_callback
};

class dflash_drafter {
public:
    // turns on feature extraction in the target and the settings the draft context needs
    dflash_drafter(llama_context * ctx_tgt, llama_context * ctx_dft, uint32_t n_seq);

    // puts all settings back
    ~dflash_drafter();

    dflash_drafter(const dflash_drafter &) = delete;
    dflash_drafter & operator=(const dflash_drafter &) = delete;

    int32_t block_size () const { return n_block; }
    int32_t n_draft_max() const { return n_block - 1; }
    int32_t top_k      () const { return n_top_k; } // 0: a draft without selector
    bool    is_causal  () const { return causal; }

    // Take the features of `rows` from the target's latest decode. Rows of one sequence must be in ascending position. A
    // sequence that already holds such positions is cut back first; one that does not reach the first row is emptied, since
    // the draft's memory has no holes: the draft then only lacks context.
    void inject(const dflash_feature_row * rows, size_t n_rows);

    // Draft one block per request. Afterwards the draft's memory is as before.
    // p_min: stop before the first token whose probability among the candidates is lower; 0 = never.
    void draft(std::vector<dflash_request> & requests, float p_min);

    // forget everything of `seq_id` at and after `pos`
    void rollback(llama_seq_id seq_id, llama_pos pos);

    // position after the last one with features; 0 if there is none
    llama_pos pos_next(llama_seq_id seq_id) const;

    // fill `trace` in every draft() from now on; `tap` must be the eval callback's data of the draft context
    void set_trace(dflash_trace_data * trace, dflash_tap * tap);

private:
    void draft_group(dflash_request ** requests, size_t n_requests, float p_min);
    void walk       (dflash_request & req, const float * lattice, int32_t n_rows, float p_min) const;
    void argmax     (dflash_request & req, int32_t i_first, int32_t n_rows, float p_min) const;
    void fill_trace (const dflash_request & req, const float * lattice, int32_t n_rows);

    llama_context * ctx_tgt;
    llama_context * ctx_dft;

    const uint32_t n_seq;

    int32_t     n_embd     = 0; // of draft and target alike
    int32_t     n_vocab    = 0;
    int32_t     n_pos_embd = 1; // positions per feature row: 4 for M-RoPE
    int32_t     n_block    = 0;
    int32_t     n_top_k    = 0;
    llama_token mask_token = LLAMA_TOKEN_NULL;
    bool        causal     = false;
    bool        causal_old = false;

    std::vector<int32_t> target_layers;

    struct batch_deleter {
        void operator()(llama_batch_ext * b) const { llama_batch_ext_free(b); }
    };
    std::unique_ptr<llama_batch_ext, batch_deleter> batch;

    std::vector<float> features; // [rows][target_layers][n_embd]

    dflash_trace_data * trace = nullptr;
    dflash_tap        * tap   = nullptr;
};

// One draft model attached to one target context: takes target features into the draft's memory and proposes blocks.
// llama-server (through common/dflash-speculative.h) and libdflash sessions share this class.
//
// The draft context must have been created with the target as `ctx_other` and must hold `n_seq` sequences. Positions of the
// draft equal those of the target. Errors are thrown as dflash_error.

#pragma once

#include "dflash-pace.h"
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
    bool            fixed  = false;        // draft n_max tokens, whatever pays: the text shall repeat with its seed

    std::vector<llama_token> tokens;       // out: the proposal, n_max tokens or fewer, empty if the draft failed
    std::vector<dflash_q_row> q;           // out, with a chain: one row per token
    std::vector<float>       confidence;      // out: per token, how sure the draft is of its likeliest candidate, 0 to 1
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
    std::vector<float>   hidden;
    std::vector<float>   logits;
    std::vector<int64_t> names; // tokens of the logits, where the draft has a smaller vocabulary of its own

    static bool callback(struct ggml_tensor * t, bool ask, void * user_data); // ggml_backend_sched_eval_callback
};

// tokens in the draft model's block, the anchor included
int32_t dflash_block_size(const llama_model * model);

// rows that a draft context of so many sequences should decode at once
uint32_t dflash_micro_batch(int32_t n_block, uint32_t n_seq);

class dflash_drafter {
public:
    // turns on feature extraction in the target and the settings the draft context needs
    dflash_drafter(llama_context * ctx_tgt, llama_context * ctx_dft, uint32_t n_seq);

    // puts all settings back
    ~dflash_drafter();

    // all layers of this draft see at most `n` positions before the anchor (0: some layer sees all): features of earlier ones
    // need not be taken
    void set_window(int64_t n);

    dflash_drafter(const dflash_drafter &) = delete;
    dflash_drafter & operator=(const dflash_drafter &) = delete;

    uint32_t sequences () const { return n_seq; }
    int32_t block_size () const { return n_block; }
    int32_t n_draft_max() const { return n_block - 1; }
    int32_t top_k      () const { return n_top_k; } // 0: a draft without selector
    bool    is_causal  () const { return causal; }

    // Keep the features of `rows` of the target's latest decode for the next draft. Rows of one sequence must be in ascending
    // position. A sequence that already holds such positions is cut back first; one that does not reach the first row is
    // emptied, since the draft's memory has no holes: the draft then only lacks context.
    // What a windowed draft will never see again is dropped unread, which makes long prompts cheap.
    void inject(const dflash_feature_row * rows, size_t n_rows);

    // Bring the draft's memory of these sequences up to date with what inject() has kept. draft() does it by itself; whoever
    // copies, shifts or saves that memory must call it before. Features that the memory refuses are lost: the sequence is
    // then emptied and n_lost() counts it.
    void flush(const llama_seq_id * seq_ids, size_t n_ids);

    // Draft one block per request, fewer where drafting does not pay at present (see dflash-pace.h; only if `adaptive`).
    // Afterwards the draft's memory is as before.
    // p_min: stop before the first token whose probability among the candidates is lower; 0 = never.
    void draft(std::vector<dflash_request> & requests, float p_min);

    bool        adaptive = false; // choose draft lengths by what pays
    dflash_pace pace;             // to be told what verification costs and accepts

    double  ms_extra = 0.0;       // cost of the latest rounds that only drafting causes (replays), taken into account once

    int64_t n_lost    () const { return n_features_lost; }
    int64_t n_injected() const { return n_features; }   // rows that the draft's memory has taken
    double  ms_inject () const { return t_inject_ms; }  // and the time it took, milliseconds

    // forget everything of `seq_id` at and after `pos`
    void rollback(llama_seq_id seq_id, llama_pos pos);

    // position after the last one with features, kept ones included; 0 if there is none
    llama_pos pos_next(llama_seq_id seq_id) const;

    // fill `trace` in every draft() from now on; `tap` must be the eval callback's data of the draft context
    void set_trace(dflash_trace_data * trace, dflash_tap * tap);

private:
    // rows kept for one sequence: a ring of `cap` rows of all target layers
    struct kept {
        std::vector<float>     data;
        std::vector<llama_pos> pos;
        size_t first = 0;
        size_t n     = 0;
        size_t cap   = 0;
        bool   gap   = false; // rows before the first one were dropped

        llama_pos front() const { return pos[first]; }
        llama_pos back () const { return pos[(first + n - 1) % cap]; }
    };

    void keep       (kept & k, llama_pos pos, const std::vector<const float *> & layers, int32_t i_batch);
    void inject_kept(const llama_seq_id * seq_ids, size_t n_ids);
    llama_pos memory_next(llama_seq_id seq_id) const;
    void memory_cut(llama_seq_id seq_id, llama_pos pos);

    void draft_group(dflash_request ** requests, size_t n_requests, float p_min);
    void walk       (dflash_request & req, const float * lattice, int32_t n_rows, float p_min) const;
    void argmax     (dflash_request & req, int32_t i_first, int32_t n_rows, float p_min) const;
    void fill_trace (const dflash_request & req, const float * lattice, int32_t n_rows, int32_t n_blocks);

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

    std::vector<kept> pending;   // by sequence
    bool   windowed   = false;   // rows beyond n_keep_max may be dropped, else they are injected
    size_t n_keep_max = 0;       // rows to keep per sequence at most

    int64_t n_features      = 0;
    int64_t n_features_lost = 0;
    double  t_inject_ms     = 0.0;

    dflash_trace_data * trace = nullptr;
    dflash_tap        * tap   = nullptr;
};

// For code that has only the draft's context: flush() of the drafter that uses it, if there is one.
void dflash_flush(llama_context * ctx_dft, llama_seq_id seq_id);

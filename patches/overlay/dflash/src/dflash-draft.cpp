#include "dflash-draft.h"

#include "dflash-error.h"
#include "dflash.h"

#include "ggml-backend.h"
#include "ggml.h"

#include "../../src/llama-ext.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

bool dflash_tap::callback(ggml_tensor * t, bool ask, void * user_data) {
    auto * tap = (dflash_tap *) user_data;

    std::vector<float> * dst = nullptr;
    if (strcmp(t->name, "result_norm") == 0) {
        dst = &tap->hidden;
    } else if (strcmp(t->name, "result_output") == 0) {
        dst = &tap->logits;
    }
    const bool lattice = strcmp(t->name, "dflash2_lattice") == 0 && t->op == GGML_OP_CUSTOM;
    if (ask) {
        return dst != nullptr || lattice;
    }
    if (lattice) { // see ggml-dflash.h
        tap->names.resize(t->src[6] ? ggml_nelements(t->src[6]) : 0);
        if (t->src[6]) {
            ggml_backend_tensor_get(t->src[6], tap->names.data(), 0, ggml_nbytes(t->src[6]));
        }
    }
    if (dst && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t)) {
        dst->resize(ggml_nelements(t));
        ggml_backend_tensor_get(t, dst->data(), 0, ggml_nbytes(t));
    }
    return true;
}

static std::string dflash_meta(const llama_model * model, const char * key) {
    char buf[64] = {};
    return llama_model_meta_val_str(model, key, buf, sizeof(buf)) >= 0 ? buf : "";
}

// drafters by their context, for dflash_flush
static std::mutex                                    dflash_registry_mutex;
static std::map<llama_context *, dflash_drafter *>   dflash_registry;

void dflash_flush(llama_context * ctx_dft, llama_seq_id seq_id) {
    dflash_drafter * drafter = nullptr;
    {
        std::lock_guard<std::mutex> lock(dflash_registry_mutex);
        const auto it = dflash_registry.find(ctx_dft);
        drafter = it == dflash_registry.end() ? nullptr : it->second;
    }
    if (drafter && seq_id >= 0 && (uint32_t) seq_id < drafter->sequences()) {
        try {
            drafter->flush(&seq_id, 1);
        } catch (const dflash_error &) {
            drafter->rollback(seq_id, 0);
        }
    }
}

// bytes of features that wait for the next draft, all sequences together
static const size_t DFLASH_KEEP_BYTES = (size_t) 1 << 30;

int32_t dflash_block_size(const llama_model * model) {
    const std::string block = dflash_meta(model, "dflash.block_size");
    return block.empty() ? 16 : std::atoi(block.c_str());
}

uint32_t dflash_micro_batch(int32_t n_block, uint32_t n_seq) {
    const uint32_t n = (uint32_t) std::max(2, std::min(n_block, DFLASH_MAX_DRAFT + 1));
    return std::max(64u, n * std::min(n_seq, 512u / n));
}

dflash_drafter::dflash_drafter(llama_context * ctx_tgt, llama_context * ctx_dft, uint32_t n_seq)
    : pace(n_seq, ctx_dft ? std::max(1, dflash_block_size(llama_get_model(ctx_dft)) - 1) : 1), ctx_tgt(ctx_tgt), ctx_dft(ctx_dft), n_seq(n_seq) {
    if (!ctx_tgt || !ctx_dft) {
        throw dflash_error(DFLASH_E_ARGUMENT, "draft-dflash needs a target context and a draft context");
    }

    const llama_model * model_tgt = llama_get_model(ctx_tgt);
    const llama_model * model_dft = llama_get_model(ctx_dft);
    const llama_vocab * vocab     = llama_model_get_vocab(model_dft);

    const uint32_t  n_ids = llama_model_target_layer_ids_n(model_dft);
    const int32_t * ids   = llama_model_target_layer_ids  (model_dft);
    if (n_ids == 0 || !ids) {
        throw dflash_error(DFLASH_E_PAIR, "the draft model does not say which target layers it reads: it is not a DFlash draft");
    }
    target_layers.assign(ids, ids + n_ids);

    n_embd     = llama_model_n_embd(model_dft);
    n_vocab    = llama_vocab_n_tokens(vocab);
    n_top_k    = std::max(0, llama_model_dflash_selector_top_k(model_dft));
    mask_token = llama_vocab_mask(vocab);
    n_pos_embd = llama_model_rope_type(model_dft) == LLAMA_ROPE_TYPE_MROPE ? 4 : 1;

    n_block = dflash_block_size(model_dft);
    causal  = dflash_meta(model_dft, "dflash.attention.causal") == "true";

    // the pair check says all this with more words; here it guards callers that skipped it
    if (n_embd != llama_model_n_embd(model_tgt)) {
        throw dflash_error(DFLASH_E_PAIR, dflash_format("hidden size: the draft has %d, the target %d", n_embd, llama_model_n_embd(model_tgt)));
    }
    if (n_vocab != llama_vocab_n_tokens(llama_model_get_vocab(model_tgt))) {
        throw dflash_error(DFLASH_E_PAIR, dflash_format("vocabulary: the draft has %d tokens, the target %d", n_vocab, llama_vocab_n_tokens(llama_model_get_vocab(model_tgt))));
    }
    if (n_block < 2 || n_block > DFLASH_MAX_DRAFT + 1) {
        throw dflash_error(DFLASH_E_PAIR, dflash_format("the draft has block size %d, expected 2 to %d", n_block, DFLASH_MAX_DRAFT + 1));
    }
    if (mask_token < 0 || mask_token >= n_vocab) {
        throw dflash_error(DFLASH_E_PAIR, dflash_format("the draft has mask token %d, expected an id below %d", mask_token, n_vocab));
    }
    for (const int32_t id : target_layers) {
        if (id < 0 || id > llama_model_n_layer(model_tgt)) {
            throw dflash_error(DFLASH_E_PAIR, dflash_format("depth: the draft reads the input of target layer %d, the target has %d layers", id, llama_model_n_layer(model_tgt)));
        }
    }
    const uint32_t n_min = std::min(llama_n_ubatch(ctx_dft), llama_n_batch(ctx_dft));
    if (n_min < (uint32_t) n_block) {
        throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("the draft context takes %u tokens at once, a block has %d: raise the batch sizes (-b, -ub)", n_min, n_block));
    }
    if (llama_n_seq_max(ctx_dft) < n_seq) {
        throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("the draft context holds %u sequences, %u are wanted", llama_n_seq_max(ctx_dft), n_seq));
    }

    batch.reset(llama_batch_ext_init(ctx_dft));

    pending.resize(n_seq);
    set_window(0);

    causal_old = llama_get_causal_attn(ctx_dft);

    for (const int32_t id : target_layers) {
        llama_set_embeddings_layer_inp(ctx_tgt, (uint32_t) id, true);
    }
    // the selector's lattice travels in the nextn rows of all tokens; without a selector the logits are read
    llama_set_embeddings_nextn(ctx_dft, n_top_k > 0, /*masked =*/ n_top_k == 0);
    llama_set_causal_attn(ctx_dft, causal);

    std::lock_guard<std::mutex> lock(dflash_registry_mutex);
    dflash_registry[ctx_dft] = this;
}

dflash_drafter::~dflash_drafter() {
    {
        std::lock_guard<std::mutex> lock(dflash_registry_mutex);
        dflash_registry.erase(ctx_dft);
    }
    for (const int32_t id : target_layers) {
        llama_set_embeddings_layer_inp(ctx_tgt, (uint32_t) id, false);
    }
    llama_set_embeddings_nextn(ctx_dft, false, false);
    llama_set_causal_attn(ctx_dft, causal_old);
}

void dflash_drafter::set_window(int64_t n) {
    const size_t n_bytes = target_layers.size() * (size_t) n_embd * sizeof(float) * n_seq;
    const size_t n_chunk = std::min(llama_n_ubatch(ctx_dft), llama_n_batch(ctx_dft));

    // the draft's windowed cache has a micro-batch of room to spare, which lets a text be cut back that far without loss
    n_keep_max = n > 0 ? (size_t) n + n_chunk : n_chunk;
    windowed   = n > 0 && n_keep_max <= DFLASH_KEEP_BYTES / n_bytes;
    if (!windowed) {
        n_keep_max = n_chunk;
    }
}

llama_pos dflash_drafter::memory_next(llama_seq_id seq_id) const {
    return llama_memory_seq_pos_max(llama_get_memory(ctx_dft), seq_id) + 1;
}

void dflash_drafter::memory_cut(llama_seq_id seq_id, llama_pos pos) {
    llama_memory_t mem = llama_get_memory(ctx_dft);
    if (!llama_memory_seq_rm(mem, seq_id, pos, -1)) {
        llama_memory_seq_rm(mem, seq_id, -1, -1);
    }
}

llama_pos dflash_drafter::pos_next(llama_seq_id seq_id) const {
    const auto & k = pending[seq_id];
    return k.n > 0 ? k.back() + 1 : memory_next(seq_id);
}

void dflash_drafter::rollback(llama_seq_id seq_id, llama_pos pos) {
    auto & k = pending[seq_id];
    while (k.n > 0 && k.back() >= pos) {
        k.n--;
    }
    if (memory_next(seq_id) > pos) {
        memory_cut(seq_id, pos);
    }
}

void dflash_drafter::set_trace(dflash_trace_data * trace, dflash_tap * tap) {
    this->trace = trace;
    this->tap   = tap;
}

void dflash_drafter::keep(kept & k, llama_pos pos, const std::vector<const float *> & layers, int32_t i_batch) {
    const size_t n_row = layers.size() * (size_t) n_embd;
    if (k.n == k.cap) {
        if (k.cap < n_keep_max) {
            // grow, oldest row first
            const size_t cap = std::min(n_keep_max, std::max<size_t>(2 * (size_t) n_block, 2 * k.cap));
            std::vector<float>     data(cap * n_row);
            std::vector<llama_pos> where(cap);
            for (size_t i = 0; i < k.n; ++i) {
                const size_t at = (k.first + i) % k.cap;
                std::copy_n(k.data.data() + at * n_row, n_row, data.data() + i * n_row);
                where[i] = k.pos[at];
            }
            k.data.swap(data);
            k.pos .swap(where);
            k.first = 0;
            k.cap   = cap;
        } else {
            // only a windowed draft gets here: it will not look at the oldest row again
            k.first = (k.first + 1) % k.cap;
            k.n--;
            k.gap = true;
        }
    }
    const size_t at = (k.first + k.n) % k.cap;
    for (size_t l = 0; l < layers.size(); ++l) {
        std::copy_n(layers[l] + (size_t) i_batch * n_embd, n_embd, k.data.data() + at * n_row + l * n_embd);
    }
    k.pos[at] = pos;
    k.n++;
}

void dflash_drafter::inject(const dflash_feature_row * rows, size_t n_rows) {
    if (n_rows == 0) {
        return;
    }

    const size_t n_layers = target_layers.size();

    std::vector<const float *> layers(n_layers);
    for (size_t k = 0; k < n_layers; ++k) {
        layers[k] = llama_get_embeddings_layer_inp(ctx_tgt, (uint32_t) target_layers[k]);
        if (!layers[k]) {
            throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("the target has no features of layer %d: it has decoded nothing since the session was opened", target_layers[k]));
        }
    }

    std::vector<bool> seen(n_seq, false);
    for (size_t i = 0; i < n_rows; ++i) {
        const auto & row = rows[i];
        if (row.seq_id < 0 || (uint32_t) row.seq_id >= n_seq) {
            throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("sequence %d is not one of the draft's %u", row.seq_id, n_seq));
        }
        auto & k = pending[row.seq_id];

        if (!seen[row.seq_id]) {
            seen[row.seq_id] = true;
            // make the sequence end right before its first row
            rollback(row.seq_id, row.pos);
            // M-RoPE positions may jump over an image, plain ones may not
            if (n_pos_embd == 1 && pos_next(row.seq_id) != row.pos) {
                rollback(row.seq_id, 0);
                k.gap = false;
            }
        }
        if (k.n == n_keep_max && !windowed) {
            flush(&row.seq_id, 1);
        }
        keep(k, row.pos, layers, row.i_batch);
    }
}

void dflash_drafter::flush(const llama_seq_id * seq_ids, size_t n_ids) {
    bool any = false;
    for (size_t i = 0; i < n_ids; ++i) {
        any = any || pending[seq_ids[i]].n > 0;
    }
    if (!any) {
        return;
    }

    const int64_t t_us = ggml_time_us();
    try {
        inject_kept(seq_ids, n_ids);
    } catch (const dflash_error & err) {
        // a draft without context is a weak draft, not a failure of the text
        if (err.status == DFLASH_E_INTERNAL) {
            throw;
        }
        n_features_lost++;
        for (size_t i = 0; i < n_ids; ++i) {
            rollback(seq_ids[i], 0);
        }
    }
    for (size_t i = 0; i < n_ids; ++i) {
        auto & k = pending[seq_ids[i]];
        k.n   = 0;
        k.gap = false;
        if (k.cap > 8 * (size_t) n_block) {
            k = kept(); // a prompt's worth of memory
        }
    }
    t_inject_ms += 1e-3 * (double) (ggml_time_us() - t_us);
}

void dflash_drafter::inject_kept(const llama_seq_id * seq_ids, size_t n_ids) {
    const size_t n_row   = target_layers.size() * (size_t) n_embd;
    const size_t n_chunk = std::min(llama_n_ubatch(ctx_dft), llama_n_batch(ctx_dft));

    size_t n = 0;
    llama_pos pos_first = 0;
    auto decode = [&] {
        const int32_t rc = n == 0 ? 0 : llama_process(ctx_dft, LLAMA_PROCESS_TYPE_DECODE, batch.get());
        if (rc != 0) {
            throw dflash_error(rc == 1 ? DFLASH_E_MEMORY : DFLASH_E_DECODE,
                    dflash_format("the draft could not take %zu feature rows at position %d (code %d)", n, pos_first, rc));
        }
        n_features += n;
        n = 0;
        llama_batch_ext_clear(batch.get());
    };

    features.resize(n_chunk * n_row);
    llama_batch_ext_clear(batch.get());
    for (size_t s = 0; s < n_ids; ++s) {
        auto & k = pending[seq_ids[s]];
        if (k.n == 0) {
            continue;
        }
        // rows were dropped, or somebody changed the memory since: what it holds does not lead up to the first row
        if (k.gap || (n_pos_embd == 1 && memory_next(seq_ids[s]) != k.front())) {
            memory_cut(seq_ids[s], 0);
        }
        for (size_t i = 0; i < k.n; ++i) {
            const size_t at = (k.first + i) % k.cap;
            if (n == 0) {
                pos_first = k.pos[at];
            }
            float * dst = features.data() + n * n_row;
            std::copy_n(k.data.data() + at * n_row, n_row, dst);

            const llama_pos pos[4] = { k.pos[at], k.pos[at], k.pos[at], 0 };
            const int32_t   idx    = llama_batch_ext_add_embd(batch.get(), seq_ids[s], { dst, 1, n_row });
            if (idx < 0 || !llama_batch_ext_set_pos(batch.get(), idx, pos)) {
                throw dflash_error(DFLASH_E_INTERNAL, dflash_format("feature row %zu of %zu does not fit the draft's batch (code %d)", i, k.n, idx));
            }
            if (++n == n_chunk) {
                decode();
            }
        }
    }
    decode();
}

void dflash_drafter::draft(std::vector<dflash_request> & requests, float p_min) {
    for (auto & req : requests) {
        req.tokens.clear();
        req.q.clear();
        req.confidence.clear();
        req.invalid = false;
        if (req.n_max > 0 && (req.anchor < 0 || req.anchor >= n_vocab)) {
            throw dflash_error(DFLASH_E_ARGUMENT, dflash_format("anchor %d is not a token id (0 to %d)", req.anchor, n_vocab - 1));
        }
    }

    // who drafts in this round
    std::vector<bool> drafts(requests.size(), true);
    if (adaptive) {
        std::vector<int32_t> seqs;
        std::vector<bool>    fixed;
        for (const auto & req : requests) {
            seqs .push_back(req.seq_id);
            fixed.push_back(req.fixed);
        }
        pace.begin(seqs, fixed, drafts);
    }

    const int64_t t_us = ggml_time_us();

    std::vector<dflash_request *> group;
    std::vector<llama_seq_id>     seq_ids;
    for (size_t r = 0; r < requests.size(); ++r) {
        if (drafts[r] && requests[r].n_max > 0) {
            group  .push_back(&requests[r]);
            seq_ids.push_back( requests[r].seq_id);
        }
    }
    if (group.empty()) {
        return;
    }
    flush(seq_ids.data(), seq_ids.size());

    // as many whole blocks at a time as a micro-batch holds
    const size_t n_fit = std::max<size_t>(1, std::min(llama_n_ubatch(ctx_dft), llama_n_batch(ctx_dft)) / n_block);
    for (size_t beg = 0; beg < group.size(); beg += n_fit) {
        draft_group(group.data() + beg, std::min(n_fit, group.size() - beg), p_min);
    }

    if (!adaptive) {
        return;
    }
    pace.drafted((int32_t) group.size(), 1e-3 * (double) (ggml_time_us() - t_us) + ms_extra);
    ms_extra = 0.0;

    std::vector<dflash_pace_block> blocks(group.size());
    for (size_t b = 0; b < group.size(); ++b) {
        blocks[b].seq        = group[b]->seq_id;
        blocks[b].sampled    = group[b]->chain && !group[b]->greedy;
        blocks[b].fixed      = group[b]->fixed;
        blocks[b].confidence = group[b]->confidence;
    }
    pace.cut(blocks);
    for (size_t b = 0; b < group.size(); ++b) {
        const size_t n = std::min(group[b]->tokens.size(), (size_t) blocks[b].n);
        group[b]->tokens.resize(n);
        group[b]->q.resize(std::min(group[b]->q.size(), n));
    }
}

void dflash_drafter::draft_group(dflash_request ** requests, size_t n_requests, float p_min) {
    // Without causality every mask token is visible to all others, so the block must be as long as in training; with it the
    // rows after the last wanted token change nothing. All blocks of a batch must have the same length.
    int32_t n_rows = n_block;
    if (causal) {
        n_rows = 2;
        for (size_t r = 0; r < n_requests; ++r) {
            n_rows = std::max(n_rows, std::min(n_block, requests[r]->n_max + 1));
        }
    }
    // near the end of the context the block must fit
    const int32_t n_ctx = (int32_t) llama_n_ctx_seq(ctx_dft);
    for (size_t r = 0; r < n_requests; ++r) {
        n_rows = std::min(n_rows, n_ctx - requests[r]->pos);
    }
    if (n_rows < 2) {
        return;
    }

    // with a selector the number of flagged rows says how many positions are scored; none: all
    int32_t n_scored = 0;
    for (size_t r = 0; r < n_requests; ++r) {
        n_scored = std::max(n_scored, requests[r]->n_max);
    }
    if (n_scored >= n_rows - 1 || trace) {
        n_scored = 0;
    }

    llama_batch_ext_clear(batch.get());
    for (size_t r = 0; r < n_requests; ++r) {
        const auto & req = *requests[r];

        // features missing in between are bridged: the draft only loses context
        rollback(req.seq_id, req.pos);
        if (n_pos_embd == 1 && pos_next(req.seq_id) != req.pos) {
            rollback(req.seq_id, 0);
        }
        for (int32_t i = 0; i < n_rows; ++i) {
            const llama_pos pos[4] = { req.pos + i, req.pos + i, req.pos + i, 0 };
            const int32_t   idx    = llama_batch_ext_add_token(batch.get(), req.seq_id, i == 0 ? req.anchor : mask_token);
            if (idx < 0 || !llama_batch_ext_set_pos(batch.get(), idx, pos)) {
                throw dflash_error(DFLASH_E_INTERNAL, dflash_format("a block of %d tokens does not fit the draft's batch (code %d)", n_rows, idx));
            }
            if (i > 0 && (n_top_k == 0 || (r == 0 && i <= n_scored))) {
                llama_batch_ext_set_output_logits(batch.get(), idx, true);
            }
        }
    }

    const int32_t rc = llama_process(ctx_dft, LLAMA_PROCESS_TYPE_DECODE, batch.get());
    if (rc == 0) {
        const float * lattice = n_top_k > 0 ? llama_get_embeddings_nextn(ctx_dft) : nullptr;
        if (n_top_k > 0 && !lattice) {
            throw dflash_error(DFLASH_E_INTERNAL, "the draft returned no candidate scores");
        }
        for (size_t r = 0; r < n_requests; ++r) {
            auto & req = *requests[r];
            if (n_top_k > 0) {
                walk(req, lattice + r * n_rows * (size_t) n_embd, n_rows, p_min);
            } else {
                argmax(req, (int32_t) r * n_rows, n_rows, p_min);
            }
            if (trace && r == 0) {
                fill_trace(req, lattice, n_rows, (int32_t) n_requests);
            }
        }
    }

    // the block's own keys and values are noise: only features stay
    for (size_t r = 0; r < n_requests; ++r) {
        rollback(requests[r]->seq_id, requests[r]->pos);
    }

    // no free cell (code 1) means no draft this time, not a failure of the text
    if (rc < 0 || rc > 1) {
        throw dflash_error(DFLASH_E_DECODE, dflash_format("the draft pass failed (code %d)", rc));
    }
}

// Lattice row t (1 <= t < n_rows): k candidate ids, then k x k scores, one row per predecessor candidate of t - 1.
// Greedy: the best candidate of each row given the one chosen before; equal scores go to the lower id. With a chain: a draw
// from the candidates as the request shapes them. Where the walk stops must not depend on a token that is dropped, or the
// accepted text would be biased: p_min looks at the likeliest candidate, not at the drawn one.
void dflash_drafter::walk(dflash_request & req, const float * lattice, int32_t n_rows, float p_min) const {
    int32_t pred = 0;
    for (int32_t t = 1; t < n_rows && (int32_t) req.tokens.size() < req.n_max; ++t) {
        const float * ids    = lattice + (size_t) t * n_embd;
        const float * scores = ids + n_top_k + (size_t) pred * n_top_k;

        int32_t best = -1;
        for (int32_t c = 0; c < n_top_k; ++c) {
            if (std::isnan(scores[c])) {
                continue;
            }
            if (best < 0 || scores[c] > scores[best] || (scores[c] == scores[best] && ids[c] < ids[best])) {
                best = c;
            }
        }
        if (best < 0 || !(ids[best] >= 0.0f && ids[best] < (float) n_vocab) || scores[best] == -INFINITY) {
            req.invalid = true;
            return;
        }
        float sum = 0.0f;
        for (int32_t c = 0; c < n_top_k; ++c) {
            sum += std::isnan(scores[c]) ? 0.0f : std::exp(scores[c] - scores[best]);
        }
        if (1.0f < p_min * sum) {
            return;
        }
        float confidence = 1.0f / sum;
        if (req.chain) {
            std::vector<llama_token> row_ids(n_top_k);
            for (int32_t c = 0; c < n_top_k; ++c) {
                const bool valid = ids[c] >= 0.0f && ids[c] < (float) n_vocab;
                if (!valid) {
                    req.invalid = true;
                    return;
                }
                row_ids[c] = (llama_token) ids[c];
            }
            dflash_q_row row;
            best = dflash_draw(req.chain, row_ids.data(), scores, n_top_k, req.greedy, *req.rng, row);
            if (best < 0) {
                return; // the chain left no candidate: nothing the target could accept either
            }
            confidence = (float) *std::max_element(row.q.begin(), row.q.end());
            req.q.push_back(std::move(row));
        }
        req.tokens.push_back((llama_token) ids[best]);
        req.confidence.push_back(confidence);
        pred = best;
    }
}

// without a selector the positions are independent: the best token of each row
void dflash_drafter::argmax(dflash_request & req, int32_t i_first, int32_t n_rows, float p_min) const {
    for (int32_t t = 1; t < n_rows && (int32_t) req.tokens.size() < req.n_max; ++t) {
        const float * logits = llama_get_logits_ith(ctx_dft, i_first + t);
        if (!logits) {
            throw dflash_error(DFLASH_E_INTERNAL, "the draft returned no logits");
        }
        int32_t best   = -1;
        float   second = -INFINITY;
        for (int32_t i = 0; i < n_vocab; ++i) {
            if (std::isnan(logits[i])) {
                continue;
            }
            if (best < 0 || logits[i] > logits[best]) {
                second = best < 0 ? second : logits[best];
                best   = i;
            } else if (logits[i] > second) {
                second = logits[i];
            }
        }
        if (best < 0 || logits[best] == -INFINITY) {
            req.invalid = true;
            return;
        }
        if (p_min > 0.0f) {
            double sum = 0.0;
            for (int32_t i = 0; i < n_vocab; ++i) {
                sum += std::isnan(logits[i]) ? 0.0 : std::exp((double) logits[i] - logits[best]);
            }
            if (1.0 < p_min * sum) {
                return;
            }
        }
        if (req.chain) {
            dflash_q_row row;
            row.ids    = { best };
            row.q      = { 1.0 };
            row.drawn  = best;
            row.greedy = true;
            req.q.push_back(std::move(row));
        }
        req.tokens.push_back(best);
        // the lead over the next token says as much as a probability, which would need all of them
        req.confidence.push_back(1.0f / (1.0f + std::exp(second - logits[best])));
    }
}

void dflash_drafter::fill_trace(const dflash_request & req, const float * lattice, int32_t n_rows, int32_t n_blocks) {
    const int32_t k     = n_top_k;
    const int32_t n_pos = n_rows - 1;

    trace->n_pos   = n_pos;
    trace->n_top_k = k;
    trace->n_embd  = n_embd;
    trace->n_vocab = n_vocab;
    trace->pos     = req.pos;
    trace->anchor  = req.anchor;
    trace->draft   = req.tokens;

    // first block of the batch, where the graph may have left out the anchor's row
    auto rows_of = [&](const std::vector<float> & src, int32_t width) {
        std::vector<float> res;
        const size_t n = src.size() / width / n_blocks;
        if (n == (size_t) n_rows || n == (size_t) n_pos) {
            const auto first = src.begin() + (n - n_pos) * width;
            res.assign(first, first + (size_t) n_pos * width);
        }
        return res;
    };
    trace->hidden = rows_of(tap->hidden, n_embd);
    trace->logits = rows_of(tap->logits, tap->names.empty() ? n_vocab : (int32_t) tap->names.size());
    if (!tap->names.empty()) {
        std::vector<float> all(trace->logits.size() / tap->names.size() * n_vocab, -INFINITY);
        for (size_t i = 0; i < trace->logits.size(); ++i) {
            all[i / tap->names.size() * n_vocab + tap->names[i % tap->names.size()]] = trace->logits[i];
        }
        trace->logits = std::move(all);
    }

    trace->candidates.assign((size_t) n_pos * k, 0);
    trace->scores    .assign((size_t) n_pos * k, 0.0f);
    trace->lattice   .assign((size_t) n_pos * k * k, 0.0f);
    if (k == 0 || trace->logits.empty()) {
        return;
    }

    for (int32_t t = 1; t < n_rows; ++t) {
        for (int32_t c = 0; c < k; ++c) {
            const float id = lattice[(size_t) t * n_embd + c];
            if (!(id >= 0.0f && id < (float) n_vocab)) {
                return; // an invalid round has nothing to show
            }
        }
    }

    std::vector<int32_t> order(k); // of this row: position in the list shown -> position in the lattice
    std::vector<int32_t> order_pred(k);
    std::iota(order_pred.begin(), order_pred.end(), 0);

    int32_t pred = 0; // in the list shown
    for (int32_t t = 0; t < n_pos; ++t) {
        const float * ids    = lattice + (size_t) (t + 1) * n_embd;
        const float * logits = trace->logits.data() + (size_t) t * n_vocab;

        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
            const float la = logits[(int32_t) ids[a]];
            const float lb = logits[(int32_t) ids[b]];
            return la != lb ? la > lb : ids[a] < ids[b];
        });
        for (int32_t c = 0; c < k; ++c) {
            trace->candidates[(size_t) t * k + c] = (llama_token) ids[order[c]];
            for (int32_t p = 0; p < k; ++p) {
                trace->lattice[((size_t) t * k + p) * k + c] = ids[k + (size_t) order_pred[p] * k + order[c]];
            }
        }
        const float * row = trace->lattice.data() + ((size_t) t * k + pred) * k;
        std::copy(row, row + k, trace->scores.begin() + (size_t) t * k);

        int32_t best = 0;
        for (int32_t c = 1; c < k; ++c) {
            const llama_token * ids_row = trace->candidates.data() + (size_t) t * k;
            if (row[c] > row[best] || (row[c] == row[best] && ids_row[c] < ids_row[best])) {
                best = c;
            }
        }
        pred       = best;
        order_pred = order;
    }
}

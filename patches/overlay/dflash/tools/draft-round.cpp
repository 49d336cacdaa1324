// dflash-draft-round: single passes of a draft, timed; `dflash-cpp bench-draft` drives it.
//
// Compiled in the patched and in the stock build from this file, so it uses only what both have: llama.h and llama-ext.h. How a
// build's server would drive the draft is told by the options. Commands come on stdin and are answered by one line of JSON each:
//
//   open SLOTS DRAFTED       contexts as a server with so many slots makes them; all slots have the prompt's features
//   round BLOCKS DRAFTED     {"us"}: one draft pass of so many slots, from the batch to the greedy proposal
//   inject BLOCKS ROWS       {"us"}: so many feature rows per slot, taken back afterwards
//   profile BLOCKS DRAFTED   {"us": {kind: microseconds}, "nodes": {kind: nodes}} of one pass
//   lattice BLOCKS DRAFTED   {"tokens", "scores"} of the greedy proposals
//   memory                   {"model", "context", "compute"}: bytes of the draft

#include "llama.h"

#include "ggml-backend.h"
#include "ggml.h"

#include "llama-ext.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

// ---- small things --------------------------------------------------------------------------------------------------------------

struct failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool starts_with(const std::string & text, const char * start) {
    return text.rfind(start, 0) == 0;
}

std::string quoted(const std::string & text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
        }
        out += (unsigned char) c < 0x20 ? ' ' : c;
    }
    return out + "\"";
}

std::string number(double value) {
    char buf[32];
    snprintf(buf, sizeof(buf), "%.12g", value);
    return std::isfinite(value) ? buf : "null";
}

template <typename T> std::string list(const std::vector<T> & values, const std::function<std::string(const T &)> & text) {
    std::string out;
    for (const auto & v : values) {
        out += (out.empty() ? "" : ", ") + text(v);
    }
    return "[" + out + "]";
}

std::string numbers(const std::vector<double> & values) {
    return list<double>(values, number);
}

std::string last_complaint; // of llama.cpp's log

void log_callback(ggml_log_level level, const char * text, void * /*user_data*/) {
    if (level == GGML_LOG_LEVEL_ERROR && *text && *text != '\n') {
        last_complaint = text;
        last_complaint.erase(last_complaint.find_last_not_of(" \n") + 1);
    }
}

// ---- what a node of the graph is for ---------------------------------------------------------------------------------------------

const char * const KINDS[] = { "convolution", "selector", "top_k", "head", "attention", "products", "rest" };

enum kind { CONVOLUTION, SELECTOR, TOP_K, HEAD, ATTENTION, PRODUCTS, REST, N_KINDS };

// ggml's own names end in ')' or are numbered; all others were given by the graph
bool is_named(const ggml_tensor * t) {
    const std::string name = t->name;
    return !name.empty() && name.back() != ')' && !starts_with(name, "node_") && !starts_with(name, "leaf_");
}

bool is_product(const ggml_tensor * t) {
    return t->op == GGML_OP_MUL_MAT || t->op == GGML_OP_MUL_MAT_ID;
}

kind kind_alone(const ggml_tensor * t) {
    switch (t->op) {
        case GGML_OP_TOP_K:
        case GGML_OP_ARGSORT:
            return TOP_K;
        case GGML_OP_FLASH_ATTN_EXT:
        case GGML_OP_SOFT_MAX:
        case GGML_OP_ROPE:
        case GGML_OP_SET_ROWS:
            return ATTENTION;
        case GGML_OP_CUSTOM: // a convolution that adds the residual has the name of the sum
            return strcmp(t->name, "dflash2_lattice") == 0 ? SELECTOR : CONVOLUTION;
        default:
            break;
    }
    if (!is_product(t)) {
        return REST;
    }
    const ggml_tensor * weight = t->src[0];
    if (weight->op != GGML_OP_NONE) {
        return ATTENTION; // keys with queries, scores with values
    }
    const bool head = strcmp(weight->name, "output.weight") == 0 || strcmp(weight->name, "token_embd.weight") == 0;
    return head ? HEAD : PRODUCTS;
}

// The convolution and the selector are many unnamed nodes in the stock graph and one each in a fused one. Both end in a node
// that has a name: what leads up to it, back to the next node with a name, belongs to it.
class classifier {
public:
    explicit classifier(const std::vector<ggml_tensor *> & nodes) {
        for (const auto * t : nodes) {
            kinds[t] = kind_alone(t);
        }
        for (const auto * t : nodes) {
            const std::string name = t->name;
            if (starts_with(name, "attn_conv_") || starts_with(name, "ffn_conv_")) {
                take(t, CONVOLUTION);
            } else if (name == "dflash2_lattice") {
                take(t, SELECTOR);
            }
        }
    }

    kind of(const ggml_tensor * t) const { return kinds.at(t); }

private:
    void take(const ggml_tensor * t, kind k) {
        kinds[t] = k;
        for (const auto * src : t->src) {
            const auto found = src ? kinds.find(src) : kinds.end();
            if (found == kinds.end() || found->second == k || is_named(src)) {
                continue;
            }
            // the selector's own products belong to it, the convolution is fed by products that do not
            const bool own = found->second == REST || (k == SELECTOR && (found->second == PRODUCTS || found->second == ATTENTION));
            if (own) {
                take(src, k);
            }
        }
    }

    std::map<const ggml_tensor *, kind> kinds;
};

// What the scheduler tells of each node. First the nodes are listed; then they are timed, as many of one kind at a time as
// follow each other.
struct observer {
    enum { OFF, LISTING, TIMING } mode = OFF;

    std::vector<ggml_tensor *> listed;
    std::vector<kind>          order; // kinds of the graph's nodes
    size_t                     next = 0;
    double                     t_last = 0.0;
    std::array<double, N_KINDS> us = {};

    static bool callback(ggml_tensor * t, bool ask, void * user_data) {
        auto & self = *(observer *) user_data;
        if (!ask) {
            const double t_now = now_us();
            self.us[self.order[self.next - 1]] += t_now - self.t_last;
            self.t_last = t_now;
            return true;
        }
        if (self.mode == LISTING) {
            self.listed.push_back(t);
        } else if (self.mode == TIMING && self.next < self.order.size()) {
            const size_t i = self.next++;
            if (i == 0) {
                self.t_last = now_us();
            }
            return i + 1 == self.order.size() || self.order[i + 1] != self.order[i];
        }
        return false;
    }
};

// ---- options -------------------------------------------------------------------------------------------------------------------

struct options {
    std::string target, draft;

    int32_t n_ctx        = 4096; // per slot
    int32_t n_prompt     = 256;
    int32_t n_batch      = 2048; // llama-server's defaults, of the target and, without block_batch, of the draft
    int32_t n_ubatch     = 512;
    int32_t n_threads    = 1;
    int32_t n_gpu_layers = -1;

    bool whole_block  = false; // a block is always as long as in training unless attention is causal
    bool block_batch  = false; // the draft's micro-batch holds the blocks of all slots, at least 64 rows
    bool all_together = false; // features of all slots in one pass
};

const char * const USAGE =
    "usage: dflash-draft-round -m TARGET.gguf -md DRAFT.gguf [-c N] [-p N] [-t N] [-ngl N] [--whole-block] [--block-batch] [--all-together]\n"
    "Times single passes of a draft, as told on standard input; `dflash-cpp bench-draft` drives it.\n";

options parse(int argc, char ** argv) {
    options opt;

    const std::map<std::string, std::string *> texts = { { "-m", &opt.target }, { "-md", &opt.draft } };
    const std::map<std::string, int32_t *> counts = {
        { "-c", &opt.n_ctx }, { "-p", &opt.n_prompt }, { "-t", &opt.n_threads }, { "-ngl", &opt.n_gpu_layers },
    };
    const std::map<std::string, bool *> flags = {
        { "--whole-block", &opt.whole_block }, { "--block-batch", &opt.block_batch }, { "--all-together", &opt.all_together },
    };
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (flags.count(name)) {
            *flags.at(name) = true;
        } else if (i + 1 < argc && texts.count(name)) {
            *texts.at(name) = argv[++i];
        } else if (i + 1 < argc && counts.count(name)) {
            *counts.at(name) = std::atoi(argv[++i]);
        } else {
            throw std::invalid_argument(name);
        }
    }
    if (opt.target.empty() || opt.draft.empty() || opt.n_prompt < 1) {
        throw std::invalid_argument("");
    }
    return opt;
}

// ---- the pair ------------------------------------------------------------------------------------------------------------------

struct deleter {
    void operator()(llama_model     * p) const { llama_model_free(p); }
    void operator()(llama_context   * p) const { llama_free(p); }
    void operator()(llama_batch_ext * p) const { llama_batch_ext_free(p); }
};

using model_ptr   = std::unique_ptr<llama_model, deleter>;
using context_ptr = std::unique_ptr<llama_context, deleter>;
using batch_ptr   = std::unique_ptr<llama_batch_ext, deleter>;

struct proposal {
    std::vector<double> tokens;
    std::vector<double> scores;
};

class bench_pair {
public:
    explicit bench_pair(const options & opt) : opt(opt) {
        model_tgt = load(opt.target, "target");
        model_dft = load(opt.draft, "draft");

        const uint32_t  n_ids = llama_model_target_layer_ids_n(model_dft.get());
        const int32_t * ids   = llama_model_target_layer_ids(model_dft.get());
        if (n_ids == 0 || !ids) {
            throw failure("the draft does not say which target layers it reads: it is not a DFlash draft");
        }
        layers.assign(ids, ids + n_ids);

        n_embd  = llama_model_n_embd(model_dft.get());
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model_dft.get()));
        n_top_k = llama_model_dflash_selector_top_k(model_dft.get());
        mask    = llama_vocab_mask(llama_model_get_vocab(model_dft.get()));
        if (n_top_k <= 0) {
            throw failure("the draft has no candidate selector, expected a DFlash 2 draft");
        }
        const std::string block = meta("dflash.block_size");
        n_block = block.empty() ? 16 : std::atoi(block.c_str());
        causal  = meta("dflash.attention.causal") == "true";
    }

    std::string facts() const {
        return std::string("{\"causal\": ") + (causal ? "true" : "false") + ", \"block\": " + number(n_block) +
               ", \"top_k\": " + number(n_top_k) + ", \"n_embd\": " + number(n_embd) + ", \"n_vocab\": " + number(n_vocab) +
               ", \"target_layers\": " + number((double) layers.size()) + "}";
    }

    void open(int32_t slots, int32_t n_draft) {
        n_slots = 0;
        batch.reset();
        ctx_dft.reset();
        ctx_tgt.reset();
        seen     = observer();
        profiled = { 0, 0 };

        ctx_tgt = make_target(slots, n_draft);
        ctx_dft = make_draft(slots, n_draft);
        batch.reset(llama_batch_ext_init(ctx_dft.get()));

        for (const int32_t id : layers) {
            llama_set_embeddings_layer_inp(ctx_tgt.get(), (uint32_t) id, true);
        }
        llama_set_embeddings_nextn(ctx_dft.get(), true, /*masked =*/ false);
        llama_set_causal_attn(ctx_dft.get(), causal);

        if (features.empty()) {
            read_prompt();
        }
        n_slots = slots;
        inject_rows(0, 1, 0, opt.n_prompt);
        for (int32_t s = 1; s < slots; ++s) {
            llama_memory_seq_cp(llama_get_memory(ctx_dft.get()), 0, s, -1, -1);
        }
    }

    double round(int32_t blocks, int32_t n_draft) {
        const double t_start = now_us();
        draft(blocks, n_draft);
        return now_us() - t_start;
    }

    double inject(int32_t blocks, int32_t rows) {
        check(blocks);
        if (rows < 1 || rows > opt.n_prompt) {
            throw failure("the rows to inject are 1 to the length of the prompt");
        }
        const double t_start = now_us();
        if (opt.all_together) {
            inject_rows(0, blocks, opt.n_prompt, rows);
        } else {
            for (int32_t s = 0; s < blocks; ++s) {
                inject_rows(s, s + 1, opt.n_prompt, rows);
            }
        }
        llama_synchronize(ctx_dft.get());
        const double t_end = now_us();
        cut(blocks);
        return t_end - t_start;
    }

    std::string profile(int32_t blocks, int32_t n_draft) {
        if (profiled != std::make_pair(blocks, n_draft)) {
            list_nodes(blocks, n_draft);
            profiled = { blocks, n_draft };
        }
        seen.next = 0;
        seen.us   = {};
        seen.mode = observer::TIMING;
        draft(blocks, n_draft);
        seen.mode = observer::OFF;
        if (seen.next != seen.order.size()) {
            throw failure("the graph changed between two equal passes");
        }
        std::array<double, N_KINDS> nodes = {};
        for (const kind k : seen.order) {
            nodes[k]++;
        }
        return "{\"us\": " + by_kind(seen.us) + ", \"nodes\": " + by_kind(nodes) + "}";
    }

    std::string lattice(int32_t blocks, int32_t n_draft) {
        std::vector<proposal> found = draft(blocks, n_draft);
        return "{\"tokens\": " + list<proposal>(found, [](const proposal & p) { return numbers(p.tokens); }) +
               ", \"scores\": " + list<proposal>(found, [](const proposal & p) { return numbers(p.scores); }) + "}";
    }

    std::string memory() const {
        if (!ctx_dft) {
            throw failure("`memory` comes after `open`");
        }
        llama_memory_breakdown_data sum;
        for (const auto & [type, data] : llama_get_memory_breakdown(ctx_dft.get())) {
            sum.model   += data.model;
            sum.context += data.context;
            sum.compute += data.compute;
        }
        return "{\"model\": " + number((double) sum.model) + ", \"context\": " + number((double) sum.context) + ", \"compute\": " +
               number((double) sum.compute) + "}";
    }

private:
    void list_nodes(int32_t blocks, int32_t n_draft) {
        seen      = observer();
        seen.mode = observer::LISTING;
        draft(blocks, n_draft);
        const classifier kinds(seen.listed);
        for (const auto * t : seen.listed) {
            seen.order.push_back(kinds.of(t));
        }
        seen.mode = observer::OFF;
    }

    model_ptr load(const std::string & path, const char * what) const {
        llama_model_params params = llama_model_default_params();
        params.n_gpu_layers = opt.n_gpu_layers;
        model_ptr model(llama_model_load_from_file(path.c_str(), params));
        if (!model) {
            throw failure(std::string("the ") + what + " does not load: " + last_complaint);
        }
        return model;
    }

    std::string meta(const char * key) const {
        char buf[64] = {};
        return llama_model_meta_val_str(model_dft.get(), key, buf, sizeof(buf)) >= 0 ? buf : "";
    }

    // as common_context_params_to_llama makes them of a server's defaults
    llama_context_params server_params(int32_t slots, int32_t n_draft) const {
        llama_context_params params = llama_context_default_params();
        params.n_ctx           = (uint32_t) (slots * opt.n_ctx);
        params.n_seq_max       = (uint32_t) slots;
        params.n_batch         = (uint32_t) opt.n_batch;
        params.n_ubatch        = (uint32_t) opt.n_ubatch;
        params.n_outputs_max   = (uint32_t) (slots * (1 + n_draft));
        params.n_threads       = opt.n_threads;
        params.n_threads_batch = opt.n_threads;
        params.swa_full        = false;
        return params;
    }

    context_ptr make_target(int32_t slots, int32_t n_draft) const {
        llama_context_params params = server_params(slots, n_draft);
        params.n_rs_seq = (uint32_t) n_draft;
        context_ptr ctx(llama_init_from_model(model_tgt.get(), params));
        if (!ctx) {
            throw failure("no context for the target: " + last_complaint);
        }
        return ctx;
    }

    context_ptr make_draft(int32_t slots, int32_t n_draft) {
        llama_context_params params = server_params(slots, n_draft);
        params.n_ctx             = llama_n_ctx(ctx_tgt.get());
        params.n_rs_seq          = 0;
        params.ctx_other         = ctx_tgt.get();
        params.cb_eval           = observer::callback;
        params.cb_eval_user_data = &seen;
        if (opt.block_batch) {
            params.n_ubatch = (uint32_t) std::max(64, n_block * std::min(slots, 512 / n_block));
            params.n_batch  = params.n_ubatch;
        }
        context_ptr ctx(llama_init_from_model(model_dft.get(), params));
        if (!ctx) {
            throw failure("no context for the draft: " + last_complaint);
        }
        return ctx;
    }

    // The prompt is made up: numbers of a fixed generator, the same in every build.
    llama_token token(uint32_t i) const {
        uint32_t x = (i + 1) * 2654435761u;
        x ^= x >> 15;
        x *= 2246822519u;
        x ^= x >> 13;
        return (llama_token) (x % (uint32_t) n_vocab);
    }

    // features of the prompt: [n_prompt][layers][n_embd]
    void read_prompt() {
        const size_t n_row = layers.size() * (size_t) n_embd;
        const batch_ptr input(llama_batch_ext_init(ctx_tgt.get()));
        features.resize((size_t) opt.n_prompt * n_row);
        for (int32_t first = 0; first < opt.n_prompt; first += opt.n_batch) {
            const int32_t n = std::min(opt.n_batch, opt.n_prompt - first);
            llama_batch_ext_clear(input.get());
            for (int32_t i = 0; i < n; ++i) {
                const int32_t idx = llama_batch_ext_add_token(input.get(), 0, token((uint32_t) (first + i)));
                const llama_pos pos[4] = { first + i, first + i, first + i, 0 };
                llama_batch_ext_set_pos(input.get(), idx, pos);
                llama_batch_ext_set_output_logits(input.get(), idx, first + i + 1 == opt.n_prompt);
            }
            process(ctx_tgt.get(), input.get(), "target");
            for (size_t l = 0; l < layers.size(); ++l) {
                const float * src = llama_get_embeddings_layer_inp(ctx_tgt.get(), (uint32_t) layers[l]);
                if (!src) {
                    throw failure("the target gives no hidden states of layer " + std::to_string(layers[l]));
                }
                for (int32_t i = 0; i < n; ++i) {
                    std::copy_n(src + (size_t) i * n_embd, n_embd, features.data() + (size_t) (first + i) * n_row + l * n_embd);
                }
            }
        }
    }

    static void process(llama_context * ctx, llama_batch_ext * input, const char * what) {
        const int32_t rc = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, input);
        if (rc != 0) {
            throw failure(std::string("the ") + what + "'s pass failed (code " + std::to_string(rc) + "): " + last_complaint);
        }
    }

    // `rows` rows of features from position `pos` on for slots first .. end - 1, a micro-batch at a time
    void inject_rows(int32_t first, int32_t end, llama_pos pos, int32_t rows) {
        const size_t  n_row   = layers.size() * (size_t) n_embd;
        const int32_t n_chunk = (int32_t) std::min(llama_n_ubatch(ctx_dft.get()), llama_n_batch(ctx_dft.get()));

        int32_t n = 0;
        auto decode = [&] {
            if (n > 0) {
                process(ctx_dft.get(), batch.get(), "draft");
            }
            llama_batch_ext_clear(batch.get());
            n = 0;
        };
        llama_batch_ext_clear(batch.get());
        for (int32_t s = first; s < end; ++s) {
            for (int32_t i = 0; i < rows; ++i) {
                const llama_pos p = pos + i;
                const llama_pos where[4] = { p, p, p, 0 };
                const float * row = features.data() + (size_t) (p % opt.n_prompt) * n_row;
                const int32_t idx = llama_batch_ext_add_embd(batch.get(), s, { row, 1, n_row });
                if (idx < 0 || !llama_batch_ext_set_pos(batch.get(), idx, where)) {
                    throw failure("the draft's batch is full");
                }
                if (++n == n_chunk) {
                    decode();
                }
            }
        }
        decode();
    }

    void check(int32_t blocks) const {
        if (n_slots == 0) {
            throw failure("`open` comes first");
        }
        if (blocks < 1 || blocks > n_slots) {
            throw failure("blocks are 1 to " + std::to_string(n_slots) + ", the slots");
        }
    }

    std::vector<proposal> draft(int32_t blocks, int32_t n_draft) {
        check(blocks);
        if (n_draft < 1 || n_draft >= n_block) {
            throw failure("drafted tokens are 1 to " + std::to_string(n_block - 1));
        }
        const int32_t n_rows = opt.whole_block && !causal ? n_block : n_draft + 1;

        llama_batch_ext_clear(batch.get());
        for (int32_t s = 0; s < blocks; ++s) {
            for (int32_t i = 0; i < n_rows; ++i) {
                const llama_token id = i == 0 ? token((uint32_t) (opt.n_prompt + s)) : mask;
                const llama_pos   p  = opt.n_prompt + i;
                const llama_pos where[4] = { p, p, p, 0 };
                const int32_t idx = llama_batch_ext_add_token(batch.get(), s, id);
                if (idx < 0 || !llama_batch_ext_set_pos(batch.get(), idx, where)) {
                    throw failure("the draft's batch is full");
                }
            }
        }
        process(ctx_dft.get(), batch.get(), "draft");
        const float * rows = llama_get_embeddings_nextn(ctx_dft.get());
        if (!rows) {
            throw failure("the draft returned no candidate scores");
        }
        std::vector<proposal> found;
        for (int32_t s = 0; s < blocks; ++s) {
            found.push_back(walk(rows + (size_t) s * n_rows * n_embd, n_draft));
        }
        cut(blocks);
        return found;
    }

    // row t >= 1: candidate ids, then scores by predecessor; equal scores go to the lower id
    proposal walk(const float * rows, int32_t n_draft) const {
        proposal found;
        int32_t  pred = 0;
        for (int32_t t = 1; t <= n_draft; ++t) {
            const float * ids    = rows + (size_t) t * n_embd;
            const float * scores = ids + n_top_k + (size_t) pred * n_top_k;
            int32_t best = 0;
            for (int32_t c = 1; c < n_top_k; ++c) {
                if (scores[c] > scores[best] || (scores[c] == scores[best] && ids[c] < ids[best])) {
                    best = c;
                }
            }
            found.tokens.push_back(ids[best]);
            found.scores.push_back(scores[best]);
            pred = best;
        }
        return found;
    }

    // what lies behind the prompt goes
    void cut(int32_t blocks) {
        for (int32_t s = 0; s < blocks; ++s) {
            if (!llama_memory_seq_rm(llama_get_memory(ctx_dft.get()), s, opt.n_prompt, -1)) {
                throw failure("the draft's memory could not be cut back");
            }
        }
    }

    static std::string by_kind(const std::array<double, N_KINDS> & values) {
        std::string out;
        for (int k = 0; k < N_KINDS; ++k) {
            out += (k ? ", " : "") + quoted(KINDS[k]) + ": " + number(values[k]);
        }
        return "{" + out + "}";
    }

    const options opt;

    model_ptr   model_tgt, model_dft;
    context_ptr ctx_tgt, ctx_dft; // the draft's goes first
    batch_ptr   batch;
    observer    seen;

    std::pair<int32_t, int32_t> profiled = { 0, 0 }; // what the list of nodes is of

    int32_t     n_slots = 0;
    int32_t     n_embd  = 0;
    int32_t     n_vocab = 0;
    int32_t     n_top_k = 0;
    int32_t     n_block = 0;
    llama_token mask    = LLAMA_TOKEN_NULL;
    bool        causal  = false;

    std::vector<int32_t> layers;
    std::vector<float>   features;
};

std::string answer(bench_pair & pair, const std::string & line) {
    std::istringstream words(line);
    std::string command;
    int32_t a = 0, b = 0;
    words >> command >> a >> b;
    if (command == "open") {
        pair.open(a, b);
        return "{}";
    }
    if (command == "round") {
        return "{\"us\": " + number(pair.round(a, b)) + "}";
    }
    if (command == "inject") {
        return "{\"us\": " + number(pair.inject(a, b)) + "}";
    }
    if (command == "profile") {
        return pair.profile(a, b);
    }
    if (command == "lattice") {
        return pair.lattice(a, b);
    }
    if (command == "memory") {
        return pair.memory();
    }
    throw failure("unknown command `" + command + "`");
}

void say(const std::string & line) {
    std::cout << line << std::endl;
}

} // namespace

int main(int argc, char ** argv) {
    options opt;
    try {
        opt = parse(argc, argv);
    } catch (const std::invalid_argument & word) {
        const bool help = strcmp(word.what(), "-h") == 0 || strcmp(word.what(), "--help") == 0;
        (help ? std::cout : std::cerr) << USAGE;
        return help ? 0 : 2;
    }
    llama_log_set(log_callback, nullptr);
    llama_backend_init();
    int code = 0;
    try {
        bench_pair pair(opt);
        say(pair.facts());
        std::string line;
        while (std::getline(std::cin, line)) {
            say(answer(pair, line));
        }
    } catch (const std::exception & err) {
        say("{\"error\": " + quoted(err.what()) + "}");
        code = 1;
    }
    llama_backend_free();
    return code;
}

// Does a draft fit a target? Answered from file headers and model metadata, before anything is allocated for the pair:
// most mismatches would otherwise end in an assertion inside the creation of the draft context.

#pragma once

#include "llama.h"

#include <cstdint>
#include <string>
#include <vector>

// what matters of a target
struct dflash_target_facts {
    std::string name;          // for messages: the path, or "the loaded target"
    std::string arch;
    int64_t     n_embd   = -1;
    int64_t     n_layer  = -1;
    int64_t     n_vocab  = -1;
    bool        has_embd = true; // false only if the header proves that the tensor is absent

    std::vector<std::string> tokens; // empty if the vocabulary was not read
};

// what matters of a draft; reasons hold everything that is wrong with the file by itself
struct dflash_draft_facts {
    std::string name;
    std::string arch;

    int64_t n_embd        = -1;
    int64_t n_layer       = -1;
    int64_t n_vocab       = -1;
    int64_t block_size    = -1;
    int64_t top_k         = 0;  // 0: first generation, no selector
    int64_t rank          = 0;
    int64_t kernel        = 0;
    int64_t group         = 0;
    int64_t mask_token    = -1;
    int64_t n_embd_fc     = -1; // input width of fc
    int64_t n_window      = 0;  // positions before the anchor that matter, if all layers are windowed; else 0
    bool    own_embd      = false;
    bool    own_output    = false;

    std::vector<int32_t>     target_layers;
    std::vector<std::string> tokens;
    std::vector<std::string> reasons;
};

// read the header of a GGUF file; throws dflash_error(DFLASH_E_FILE) if that is impossible
dflash_target_facts dflash_target_facts_from_file (const std::string & path);
dflash_target_facts dflash_target_facts_from_model(const llama_model * model);
dflash_draft_facts  dflash_draft_facts_from_file  (const std::string & path);

// every reason why the pair cannot work, one sentence each; empty if it fits
std::vector<std::string> dflash_pair_reasons(const dflash_target_facts & target, const dflash_draft_facts & draft);

// target architectures whose graphs export the inputs of their layers in this base
bool dflash_target_arch_supported(const std::string & arch);

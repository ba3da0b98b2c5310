# Bash completion for the pd commands. Options come from the command's own --help, so they are never out of date.

_pd_options() {
    "$@" --help 2>/dev/null | grep -oE -- '(^|[ ,])--?[A-Za-z0-9][A-Za-z0-9-]*' | tr -d ' ,' | sort -u
}

_pd() {
    local cmd=$1 cur=$2 prev=$3 name=${1##*/} words verb=
    COMPREPLY=()

    # --name=value arrives here as three words.
    if [[ $cur == = ]]; then cur= ; elif [[ $prev == = ]]; then prev=${COMP_WORDS[COMP_CWORD - 2]}; fi
    [[ ${COMP_WORDS[COMP_CWORD]} != = ]] || prev=${COMP_WORDS[COMP_CWORD - 1]}

    # Each verb of pd-bench has its own options.
    if [[ $name == pd-bench && $COMP_CWORD -gt 1 && ${COMP_WORDS[1]} != -* ]]; then verb=${COMP_WORDS[1]}; fi

    case $prev in
        --format) words="json msgpack" ;;
        --kv-dtype) words="f16 f32 bf16" ;;
        --kv) words="inline" ;;
        --codec) words="none zstd auto" ;;
        --allow-convert) words="block_size order block_size,order" ;;
        --order) words="hnd nhd" ;;
        --on-mismatch) words="recompute fail" ;;
        --policy) words="aggregated fixed" ;;
        --role) words="${name#pd-} both" ;;
        --prefer) words="prefill decode" ;;
        --via) words="shm,inline shm,rdma,tcp,inline shm rdma tcp,inline tcp inline" ;;
        --arrivals) words="poisson gamma onoff even trace" ;;
        --prefix) words="cold partial full trace" ;;
        --tests) words="pp128 pp512 pp2048 tg64 pp128,pp512,pp2048,tg64" ;;
        --chunk | -t | --threads | --block-size | --seed | --epoch | --domain | --bound | --last | --window | --above | --trace-max) return ;;
        -m | --model | -i | --input | -o | --output | --trace | --ids | --out | --key-file | --streams | --with | --requests) compopt -o default 2>/dev/null; return ;;
    esac

    if [[ -z $words && $cur == -* ]]; then words=$(_pd_options "$cmd" ${verb:+"$verb"}); fi

    if [[ -z $words ]]; then
        local i verbs=()
        for ((i = 1; i < COMP_CWORD; i++)); do
            [[ ${COMP_WORDS[i]} == -* ]] || verbs+=("${COMP_WORDS[i]}")
        done
        case $name in
            pd-trace)
                if [[ ${#verbs[@]} == 0 ]]; then words="cat ls show check merge stats follow why replay drift regret kv verify"
                elif [[ ${verbs[*]} == kv ]]; then words="ls quickcheck verify stat diff slice convert salvage png"
                fi ;;
            pd-bench) [[ ${#verbs[@]} != 0 ]] || words="engine logits gen load score calibrate" ;;
        esac
    fi

    if [[ -n $words ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
    else
        compopt -o default 2>/dev/null
    fi
}

complete -F _pd pd-prefill pd-decode pd-route pd-kvsend pd-trace pd-bench

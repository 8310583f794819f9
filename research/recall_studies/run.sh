#!/bin/bash
# RULER, recall and spans of the two demo checkpoints. Needs .carry/essays (a folder of .txt files) and, beside torch,
# the wheels of lm-eval, datasets, wonderwords and scipy. Results go to build/ruler, archives to $OUT; a second call on
# the same machine goes on with the jobs that have no results yet.
#   run.sh            on a GPU; more than 205 s
#   SIZE=tiny ...     the same jobs on a CPU, two samples at 1K and 2K
#   DEADLINE=270      seconds after which nothing new is started, what runs is ended, and what exists is packed
set -u
PY=${PY:-python3 -P}
ROOT=$PWD WORK=$PWD/build/ruler
ESSAYS=${ESSAYS:-$PWD/.carry/essays}
DEADLINE=${DEADLINE:-270}
if [ "${SIZE:-full}" = tiny ]; then
  DEVICE=cpu AT=1 N=2 N_GRID=3 N_FORCED=2 BATCH_TOKENS=16384 SPANS=2 DTYPE=float32
  LENGTHS=1024,2048 CWE=1152,2048 MQRAR_PAIRS=32,64 NBACK_LENGTHS=1024 GRID=3
else
  DEVICE=cuda AT=${AT:-6} N=${N:-50} N_GRID=110 N_FORCED=100 BATCH_TOKENS=${BATCH_TOKENS:-524288} SPANS=8 DTYPE=bfloat16
  LENGTHS=1024,2048,4096,8192,16384 CWE=1152,2048,4096,8192,16384 MQRAR_PAIRS=32,64,96,128,160,192
  NBACK_LENGTHS=1024,4096,16384 GRID=11
fi
export OMP_NUM_THREADS=1 RAYON_NUM_THREADS=${RAYON_NUM_THREADS:-2} TOKENIZERS_PARALLELISM=true
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HOME=$WORK/hf SBEVAL_CACHE=$WORK/cache PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export LOGLEVEL=WARNING TRITON_CACHE_DIR=$WORK/triton
mkdir -p "$WORK" "${OUT:?}"
STARTED=$(date +%s)
say() { echo "[$(($(date +%s) - STARTED)) s] $*"; }

# name | tasks | samples | metadata beside the lengths; those of one forward pass a sample first, since they are
# quick: RULER sets no stop sequence, so each of its answers takes all 128 steps, which many processes on one GPU wait for
jobs() {
  local ruler="\"context_lengths\": [$LENGTHS], \"essays\": \"$ESSAYS\""
  local needles="\"context_lengths\": [512, $LENGTHS], \"essays\": \"$ESSAYS\""
  cat <<JOBS
forced|sb_niah_forced|$N_FORCED|$needles, "num_samples": $N_FORCED
forced_grid|sb_niah_single_1_forced,sb_niah_multikey_1_forced|$N_GRID|$ruler, "num_samples": $N_GRID, "depths": $GRID
span|sb_span|$SPANS|"context_lengths": [$LENGTHS], "num_samples": $SPANS
mqrar|sb_mqrar|$N_FORCED|"vocabulary": 4096, "pairs": [$MQRAR_PAIRS], "num_samples": $N_FORCED
text_mqrar_1|sb_mqrar_text,sb_flipflop|$N|"context_lengths": [$LENGTHS], "num_samples": $N
text_mqrar_2|sb_mqrar_text|$N|"context_lengths": [$NBACK_LENGTHS], "num_samples": $N, "n_back": 2
text_mqrar_3|sb_mqrar_text|$N|"context_lengths": [$NBACK_LENGTHS], "num_samples": $N, "n_back": 3
text_mqrar_4|sb_mqrar_text|$N|"context_lengths": [$NBACK_LENGTHS], "num_samples": $N, "n_back": 4
ruler1|sb_niah_single_1,sb_niah_single_2,sb_niah_single_3|$N|$needles, "num_samples": $N
ruler2|sb_niah_multikey_1,sb_niah_multikey_2,sb_niah_multikey_3|$N|$needles, "num_samples": $N
ruler3|sb_niah_multivalue,sb_niah_multiquery|$N|$needles, "num_samples": $N
ruler4|sb_ruler_vt,sb_ruler_cwe,sb_ruler_fwe|$N|$ruler, "num_samples": $N, "sb_ruler_cwe": {"context_lengths": [$CWE]}
grid1|sb_niah_single_1|$N_GRID|$ruler, "num_samples": $N_GRID, "depths": $GRID
grid2|sb_niah_multikey_1|$N_GRID|$ruler, "num_samples": $N_GRID, "depths": $GRID
JOBS
}

one() {  # model, job line
  local model=$1 name tasks samples metadata; IFS='|' read -r name tasks samples metadata <<<"$2"
  local folder=$WORK/results/$model/$name
  [ -e "$folder/finished" ] && { say "$model $name was there"; return; }
  [ $(($(date +%s) - STARTED)) -gt "$DEADLINE" ] && { say "$model $name not started"; return; }
  mkdir -p "$folder"
  local options=(--model_args "pretrained=$ROOT/sbeval/demo/checkpoints/$model,dtype=$DTYPE,max_length=16384,max_batch_tokens=$BATCH_TOKENS"
    --tasks "$tasks" --limit "$samples" --device $DEVICE --batch_size auto --metadata "{$metadata}" --output_path "$folder")
  printf '%q ' sbeval run "${options[@]}" >"$folder/command.txt"
  local begun; begun=$(date +%s)
  (cd "$WORK" && timeout -k 2 $((DEADLINE - begun + STARTED + 1)) $PY -c 'import sys; from sbeval.harness.run import run; run(sys.argv[1:])' "${options[@]}") >"$folder/log.txt" 2>&1
  local code=$?
  say "$model $name: exit $code after $(($(date +%s) - begun)) s"
  if [ $code = 0 ]; then touch "$folder/finished"; else tail -n 4 "$folder/log.txt"; fi  # ended as it wrote is not finished
}
export -f one say; export WORK STARTED ROOT DEVICE DTYPE BATCH_TOKENS DEADLINE PY
ls "$ESSAYS"/*.txt >/dev/null || exit 1
say "$(nproc) cores, $AT jobs at a time"
jobs | while IFS= read -r line; do for model in stickbreaking rope; do printf '%s\0%s\0' "$model" "$line"; done; done |
  xargs -0 -n 2 -P "$AT" bash -c 'one "$@"' one

# whole prompts would be hundreds of megabytes: all but the first sample keep their beginning and end
$PY - "$WORK/results" <<'CODE'
import json, pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("samples_*.jsonl"):
    lines = path.read_text(encoding="utf-8").splitlines()
    out = []
    for number, line in enumerate(lines):
        row = json.loads(line)
        for arguments in row.get("arguments", {}).values() if isinstance(row.get("arguments"), dict) else []:
            for key, text in arguments.items():
                if isinstance(text, str) and len(text) > 1000:
                    arguments[key] = text[:200] + f" [... {len(text) - 800} characters ...] " + text[-600:]
        out.append(json.dumps(row))
    path.write_text("\n".join(out) + "\n", encoding="utf-8")
CODE
for model in stickbreaking rope; do
  [ -d "$WORK/results/$model" ] && tar -C "$WORK/results" -czf "$OUT/ruler-$model.tar.gz" "$model"
done
say "done: $(find "$WORK/results" -name finished | wc -l) of 28 jobs, $(du -ch "$OUT"/ruler-*.tar.gz | tail -n 1 | cut -f 1)"

export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false
L=${OUT:-/tmp}; start=$SECONDS
say() { echo "=== $* ($((SECONDS - start)) s)"; }
for d in 0 1 2; do
  timeout 70 python -m pytest -q -m gpu tests/gpu/test_serving_kernels.py -k "dtype$d or nothing" --tb=short -p no:cacheprovider >$L/kernels$d.log 2>&1 & p[$d]=$!
done
timeout 70 python -m pytest -q -m gpu tests/gpu/test_serving_gpu.py --tb=short -p no:cacheprovider >$L/engine.log 2>&1 & p[3]=$!
timeout 62 python scripts/bench_serve.py attention >$L/warm_attention.log 2>&1 & p[4]=$!
timeout 62 python scripts/bench_serve.py adapters >$L/warm_adapters.log 2>&1 & p[5]=$!
wait ${p[@]}
for f in kernels0 kernels1 kernels2 engine; do say $f; tail -c 1400 $L/$f.log; done
say step; timeout 45 python scripts/bench_serve.py step --quick --profile >$L/step.log 2>&1; grep -v '^{' $L/step.log | tail -c 5000
say compiled; timeout 60 python scripts/bench_serve.py step --quick --profile --compile >$L/compiled.log 2>&1; grep -v '^{' $L/compiled.log | tail -c 4000
say sweeps; timeout 14 python scripts/bench_serve.py adapters >$L/adapters.log 2>&1; grep -h -v '^{' $L/adapters.log | tail -c 4000
timeout 14 python scripts/bench_serve.py attention >$L/attention.log 2>&1; grep -h -v '^{' $L/attention.log | tail -c 1500
say end

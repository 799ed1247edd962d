import psutil, time
from tests.runtime.support import *
from tests.runtime.test_faults import spec_of
def test_x(embedded, inject):
    def show(label):
        for z in psutil.Process().children():
            ws = z.children()
            before = {w.pid: {t.id: t.user_time + t.system_time for t in w.threads()} for w in ws}
            time.sleep(3)
            for w in ws:
                d = {t.id: round(t.user_time + t.system_time - before[w.pid].get(t.id, 0), 2) for t in w.threads()}
                print(label, w.pid, len(d), {k: v for k, v in d.items() if v > 0.1}, [open(f"/proc/{w.pid}/task/{k}/comm").read().strip() for k, v in d.items() if v > .1])
    show("fresh")
    run(embedded, spec_of(embedded, "allreduce"))
    show("undisturbed")
    for i in range(4):
        inject(step=5, position=5, phase="forward")
        run(embedded, spec_of(embedded, "allreduce"))
        show(f"after {i+1} kills")
    inject(step=5, position=5, phase="forward")
    run(embedded, spec_of(embedded, "local_sgd"))
    show(f"after local kill")

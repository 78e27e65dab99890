"""The release gate for LLM serving: the map and the glossary.

One sentence: a **scenario's** *traffic* is planned; the *player* sends the plan to a *target* while
*watch* listens; all of it lands on one *timeline*; *judge* turns the timeline into a *verdict*;
*report* tells it.

    scenario.yaml --plan--> plan.jsonl --run--> log.* --judge--> verdict.json --report--> report.md, junit.xml

Every verb reads files and writes the next, so each can be run again alone, on a finished or a broken run.

The rooms, upper ones may import lower ones only:

    cli         the door: plan, run, judge, report, verify, import, record, heal, stack, doctor
    record      a run with tcpdump beside it -> a recording
    capacity    what a GPU serves -> how many, and what they cost
    run         the conductor: children, start barrier, stop
    evidence    a run directory: laid out, judged, verified
    drivers     play a plan, write observations          report   tell a verdict (text, Markdown, JUnit)
    chaos       break the stack and mend it, under guard: faults, discipline, guard, undo, experiments
    watch       asks what the stack says of itself; sources, how each kind of it is asked
    scenario    a scenario file <-> one frozen Scenario
    traffic     what to send and when; pure, seeded      targets  the stack under test
    judge       timeline + gates -> verdict; pure
    document    a YAML file with the line of every key, read into typed values
    timeline    a run directory, read as one value
    log         events, readings and observations as files; plan_file, the plan as one
    units       numbers with units, as a user writes them; headers, what may stand in a request's head
    provenance  where a run came from
    parent      a child that does not outlive its parent; processes, who a process is
    model       the nouns

Words:

    arrival           one moment at which a user sends a request
    open loop         arrivals that never wait for answers
    due               when the plan says a request is to be sent, in seconds from the run's origin
    send lag          sent minus due: how late the harness itself was
    response latency  due to last byte: what a user waits; the one that is gated
    service latency   sent to last byte: what the stack took; shown beside it
    TTFT              time to first token, from due
    ITL               inter-token latency: the gap between two content events of one stream
    TPOT              time per output token: (last token - first token) / (tokens out - 1)
    warm-up           traffic before the steady state; sent, recorded, not judged
    steady state      the window that gates are judged in
    plan              every request of a run, seeded and written before the run
    player            sends the plan
    capture           packets, as tcpdump wrote them; flows are what each side said, messages are HTTP
    recording         captured requests as a file: scrubbed, with their moments, answers and an account of losses
    replay            a recording played again; a group is a captured connection or session
    fault             one way to break the stack: aims, injects, proves it, undoes, proves that; believed by proof only
    guard             a process that undoes a fault when whoever injected it is gone
    heal              take back what is left over
    target            the stack under test
    window            a named span of the timeline; a request belongs to the window it was due in
    gate              a promise that a scenario makes, with its limit
    recovery          from the fault's proof to when users are well served again for good, by their own requests
    finding           what one gate saw
    verdict           PASS, FAIL, INCONCLUSIVE or INVALID, over all findings
"""

//! A manager with a scripted target.

use super::super::known::DriveOfVolume;
use super::super::scripted_target::{
    CONNECT_INVALID, MS, Payload, ScriptedTarget, VOLUME, carry, config, pass,
};
use super::*;
use crate::initiator::association::AssociationConfig;
use alloc::string::ToString;
use alloc::vec::Vec;
use riopipe_nvme::command::Status;
use std::vec;

use crate::wire::{ADMIN_CLAIM, ADMIN_RELEASE, status};

const LOSS: u64 = 5_000 * MS;
const S: u64 = 1_000 * MS;

type Manager = AssociationManager<Payload>;

fn manager(target: &mut ScriptedTarget, loss_ns: u64, claims: bool) -> Manager {
    manager_of(config(), target, loss_ns, claims)
}

/// A manager of an association with the limits that the program has unless an option changes them.
fn usual_manager(target: &mut ScriptedTarget, loss_ns: u64) -> Manager {
    let config = AssociationConfig { keep_alive_ms: 15_000, answer_ns: 10 * S, ..config() };
    manager_of(config, target, loss_ns, true)
}

fn manager_of(
    config: AssociationConfig,
    target: &mut ScriptedTarget,
    loss_ns: u64,
    claims: bool,
) -> Manager {
    let mut association = Association::new(config);
    carry(&mut association, target, 0);
    let controller = association.controller().expect("attached");
    let drives = [1, 2].map(|nsid| DriveOfVolume { nsid, index: nsid as u16, blocks: 908 });
    let known = KnownTarget::new(VOLUME, 5, controller, drives);
    let claim = claims.then(|| Claim { resume: true, ..Claim::plain(VOLUME, 5, 1, Vec::new()) });
    let back_off = BackOff { first_ns: 10 * MS, max_ns: 1000 * MS };
    AssociationManager::new(association, ManagerConfig { known, claim, loss_ns, back_off, seed: 7 })
}

fn events(manager: &mut Manager) -> Vec<&'static str> {
    core::iter::from_fn(|| manager.next_event())
        .map(|event| match event {
            ManagerEvent::Lost { .. } => "lost",
            ManagerEvent::Ended => "ended",
            ManagerEvent::Back { .. } => "back",
            ManagerEvent::GivenUp { .. } => "given up",
            ManagerEvent::Refused { .. } => "refused",
            ManagerEvent::StreamConnection { .. } => "stream",
        })
        .collect()
}

/// The target's power is cut: its connections end.
fn cut(manager: &mut Manager, target: &mut ScriptedTarget, now: u64) {
    target.up = false;
    target.asked.clear();
    target.connects.clear();
    manager.closed(ControlQueue::Admin, ConnectionEnd::Closed, now);
}

fn request(attempts: u32) -> ConnectRequest {
    ConnectRequest { stream: StreamId(3), server: 0, link: 0, qid: 4, depth: 8, attempts }
}

#[test]
fn p7_a_target_that_comes_back_is_recognised_and_claimed_again() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    let mut now = 0;
    pass(&mut manager, &mut target, &mut now, S);
    assert!(manager.is_standing() && events(&mut manager).is_empty());
    cut(&mut manager, &mut target, now);
    assert!(manager.association().is_none() && !manager.is_open(ControlQueue::Admin));
    pass(&mut manager, &mut target, &mut now, 2 * S);
    assert!(manager.absence().is_some_and(|absence| {
        absence.since == S
            && !absence.for_good
            && absence.why.to_string() == "nothing listens there"
    }));
    target.up = true;
    pass(&mut manager, &mut target, &mut now, 4 * S);
    assert!(manager.is_standing() && manager.absence().is_none());
    assert_eq!(manager.association_number(), 2);
    assert_eq!(target.asked, [0x02, 0x02, ADMIN_CLAIM], "both labels are read before the claim");
    assert_eq!(events(&mut manager), ["lost", "back"]);
    assert!(!manager.is_open(ControlQueue::Drives), "that queue is for recoveries");
}

#[test]
fn p7_no_connection_is_handed_out_before_streams_get_the_new_association() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    let mut now = 0;
    manager.request(request(0), now);
    pass(&mut manager, &mut target, &mut now, MS);
    assert_eq!(events(&mut manager), ["stream"]);
    cut(&mut manager, &mut target, now);
    manager.request(request(0), now);
    target.up = true;
    target.claims = vec![status::STREAM_BUSY.0];
    pass(&mut manager, &mut target, &mut now, S);
    assert_eq!(target.connects, [0, 1, 0, 1], "no stream's connection before it is back");
    assert_eq!(events(&mut manager), ["lost", "back", "stream"]);
}

#[test]
fn a_connection_that_comes_after_the_association_is_lost_is_not_used() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    manager.request(request(0), 0);
    manager.timeout(0);
    let wanted = manager.wants_connection();
    assert_eq!(wanted, Some(ConnectionId::Stream(StreamId(3))));
    cut(&mut manager, &mut target, 0);
    manager.connected(ConnectionId::Stream(StreamId(3)), true, 0);
    assert_eq!(events(&mut manager), ["lost"]);
    assert_eq!(manager.wants_connection(), None);
    target.up = true;
    let mut now = 0;
    pass(&mut manager, &mut target, &mut now, S);
    assert_eq!(events(&mut manager), ["back", "stream"], "the request has been kept");
}

#[test]
fn streams_wait_longer_after_each_failed_connection() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    for (attempts, least) in [(0, 0), (1, 7), (3, 30), (9, 750)] {
        manager.request(request(attempts), 0);
        let at = manager.requests.deadline().expect("a request");
        assert!((least * MS..=1000 * MS).contains(&at), "{attempts}: {at}");
    }
    // A failure to connect counts, too.
    manager.request(request(0), 0);
    manager.timeout(0);
    let connection = manager.wants_connection().expect("it is due");
    manager.connect_failed(connection, ConnectFailure("refused".into()), 0);
    assert_eq!(manager.wants_connection(), None);
    assert!(manager.requests.deadline().is_some_and(|at| at >= 7 * MS));
    // A stream that was opened anew is not held up by failures of its last run.
    manager.request(request(0), 0);
    manager.timeout(0);
    assert_eq!(manager.wants_connection(), Some(connection));
}

#[test]
fn p8_attempts_become_rare_and_never_end() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    cut(&mut manager, &mut target, 0);
    let (mut now, mut attempts, mut last) = (0, 0, 0);
    while now < 3_600 * S {
        let at = manager.deadline().expect("it goes on");
        assert!(at <= now + 1000 * MS, "bounded");
        now = at;
        manager.timeout(now);
        if manager.wants_connection().is_some() {
            attempts += 1;
            last = now;
            carry(&mut manager, &mut target, now);
        }
    }
    assert!((3_600..4_900).contains(&attempts), "{attempts}");
    assert!(last > 3_599 * S);
    assert_eq!(events(&mut manager), ["lost", "given up"], "reported once");
    target.up = true;
    pass(&mut manager, &mut target, &mut now, 3_602 * S);
    assert_eq!(events(&mut manager), ["back"], "it can be reopened");
    // The next loss begins with short waits.
    cut(&mut manager, &mut target, now);
    assert!(manager.deadline().is_some_and(|at| at <= now + 10 * MS));
}

#[test]
fn streams_get_an_event_when_the_time_is_over_and_not_before() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    cut(&mut manager, &mut target, S);
    let mut now = S;
    pass(&mut manager, &mut target, &mut now, S + LOSS - 1);
    assert_eq!(events(&mut manager), ["lost"]);
    pass(&mut manager, &mut target, &mut now, S + LOSS);
    let Some(ManagerEvent::GivenUp { unreachable_ns }) = manager.next_event() else { panic!() };
    assert_eq!(unreachable_ns, LOSS);
}

#[test]
fn t27_a_changed_target_is_refused_before_any_further_command() {
    let cause = |manager: &mut Manager| loop {
        match manager.next_event() {
            Some(ManagerEvent::Refused { cause, .. }) => break cause,
            Some(_) => {}
            None => panic!("it is not refused"),
        }
    };
    let overtaken = Cause::Status(status::STALE_GENERATION.code());
    // The log's region; a newer owner's label; an older copy of a drive.
    for (region, generation, asked, expected) in [
        ([4; 16], 5, 0, Cause::Changed),
        ([3; 16], 6, 1, overtaken),
        ([3; 16], 4, 1, Cause::Changed),
    ] {
        let mut target = ScriptedTarget::new();
        let mut manager = manager(&mut target, LOSS, true);
        cut(&mut manager, &mut target, 0);
        (target.up, target.region, target.generation) = (true, region, generation);
        let mut now = 0;
        pass(&mut manager, &mut target, &mut now, S);
        assert_eq!(cause(&mut manager), expected);
        assert_eq!(target.asked.len(), asked, "no claim");
        assert!(manager.absence().is_some_and(|absence| absence.for_good));
        assert!(!manager.is_open(ControlQueue::Admin) && manager.deadline().is_none());
        manager.request(request(0), now);
        assert_eq!(manager.wants_connection(), None);
    }
}

#[test]
fn t8_a_claim_is_sent_again_unless_it_is_refused_for_good() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    cut(&mut manager, &mut target, 0);
    target.up = true;
    target.claims = vec![status::STREAM_BUSY.0, status::LOG_FAILED.0, Status::INTERNAL.0];
    let mut now = 0;
    pass(&mut manager, &mut target, &mut now, S);
    assert_eq!(events(&mut manager), ["lost", "back"]);
    cut(&mut manager, &mut target, now);
    target.up = true;
    target.claims = vec![status::LEASE_OVER.0; 9];
    pass(&mut manager, &mut target, &mut now, 2 * S);
    assert_eq!(events(&mut manager), ["lost", "refused"]);
    assert_eq!(target.claims.len(), 8, "asked once");
    assert!(manager.absence().is_some_and(|a| a.why.to_string().contains("lease is over")));
}

#[test]
fn failures_that_may_pass_are_tried_again() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    cut(&mut manager, &mut target, 0);
    (target.up, target.label_status) = (true, 0x281);
    let mut now = 0;
    pass(&mut manager, &mut target, &mut now, S);
    assert!(manager.absence().is_some_and(|absence| !absence.for_good));
    // The target has not seen the end of its last connection.
    (target.label_status, target.refusals) = (0, vec![CONNECT_INVALID; 3]);
    pass(&mut manager, &mut target, &mut now, 3 * S);
    assert!(manager.is_standing());
    // It attaches and then sends nothing more.
    cut(&mut manager, &mut target, now);
    (target.up, target.mute) = (true, Some(false));
    pass(&mut manager, &mut target, &mut now, 6 * S);
    assert!(!manager.is_standing());
    target.mute = None;
    pass(&mut manager, &mut target, &mut now, 9 * S);
    assert!(manager.is_standing());
}

#[test]
fn without_a_loss_timeout_a_loss_is_for_good_and_a_late_answer_is_no_loss() {
    let mut target = ScriptedTarget::new();
    let mut manager = usual_manager(&mut target, 0);
    target.mute = Some(true);
    let mut now = 0;
    manager.request_release(VOLUME, now).expect("it can be asked");
    pass(&mut manager, &mut target, &mut now, 90 * S);
    assert!(manager.is_standing(), "it answers Keep Alive, so the question may be answered later");
    cut(&mut manager, &mut target, now);
    assert_eq!(events(&mut manager), ["lost", "refused"]);
    assert_eq!(manager.deadline(), None);
    assert!(manager.absence().is_some_and(|absence| absence.for_good && absence.since == now));
    // Without any answer.
    let mut target = ScriptedTarget::new();
    let mut manager = usual_manager(&mut target, 0);
    target.mute = Some(false);
    let mut now = 0;
    pass(&mut manager, &mut target, &mut now, 3 * S - 1);
    assert!(manager.is_standing(), "it may only be slow");
    pass(&mut manager, &mut target, &mut now, 3 * S);
    assert_eq!(events(&mut manager), ["lost", "refused"]);
    assert!(manager.absence().is_some_and(|absence| absence.for_good && absence.since == 0));
}

/// The times of the two events of a loss, ns.
#[derive(Debug, PartialEq, Eq)]
struct LossTimes {
    noticed: u64,
    since: u64,
    given_up: u64,
    /// As the event that gives the target up reports it.
    unreachable: u64,
}

/// Lets time pass until the target is given up.
fn loss_times(manager: &mut Manager, target: &mut ScriptedTarget, now: &mut u64) -> LossTimes {
    let (mut noticed, mut lost_since) = (None, None);
    loop {
        let at = manager.deadline().expect("there is always something to do");
        pass(manager, target, now, at);
        while let Some(event) = manager.next_event() {
            match event {
                ManagerEvent::Lost { since, .. } => {
                    (noticed, lost_since) = (Some(*now), Some(since));
                }
                ManagerEvent::GivenUp { unreachable_ns } => {
                    let (noticed, since) = (noticed.unwrap(), lost_since.unwrap());
                    assert!(manager.absence().is_some_and(|it| it.since == since && it.given_up));
                    return LossTimes {
                        noticed,
                        since,
                        given_up: *now,
                        unreachable: unreachable_ns,
                    };
                }
                event => panic!("{event:?}"),
            }
        }
    }
}

/// The time in the option is the whole time, whatever it takes to notice the loss.
#[test]
fn the_loss_timeout_counts_from_the_last_sign_of_life() {
    // The loss timeout, and the silence until the loss is noticed, s.
    for (loss, noticed) in [(1, 3), (3, 3), (5, 3), (12, 6), (30, 10), (600, 10)] {
        let mut target = ScriptedTarget::new();
        let mut manager = usual_manager(&mut target, loss * S);
        let mut now = 0;
        pass(&mut manager, &mut target, &mut now, 100 * S);
        assert!(manager.is_standing() && events(&mut manager).is_empty());
        let received = manager.association().unwrap().last_received();
        assert!(now - received <= noticed * S / 3, "Keep Alive is frequent enough");
        // It is stopped, or its link is cut: the connections stay.
        (target.mute, target.up) = (Some(false), false);
        let times = loss_times(&mut manager, &mut target, &mut now);
        let whole = loss.max(noticed) * S;
        let expected = LossTimes {
            noticed: received + noticed * S,
            since: received,
            given_up: received + whole,
            unreachable: whole,
        };
        assert_eq!(times, expected, "{loss} s");
    }
}

#[test]
fn a_connection_that_ends_is_a_sign_of_life() {
    let mut target = ScriptedTarget::new();
    let mut manager = usual_manager(&mut target, 5 * S);
    let mut now = 0;
    pass(&mut manager, &mut target, &mut now, 2 * S + 7);
    cut(&mut manager, &mut target, now);
    let since = now;
    let times = loss_times(&mut manager, &mut target, &mut now);
    assert_eq!((times.since, times.given_up, times.unreachable), (since, since + 5 * S, 5 * S));
}

#[test]
fn bytes_for_streams_are_signs_of_life() {
    let mut target = ScriptedTarget::new();
    let mut manager = usual_manager(&mut target, 5 * S);
    let mut now = 0;
    target.mute = Some(false);
    pass(&mut manager, &mut target, &mut now, 3 * S - 1);
    manager.note_received(2 * S);
    pass(&mut manager, &mut target, &mut now, 5 * S - 1);
    assert!(manager.is_standing());
    manager.note_received(S);
    let times = loss_times(&mut manager, &mut target, &mut now);
    assert_eq!((times.since, times.noticed, times.given_up), (2 * S, 5 * S, 7 * S));
}

/// A machine that slept has received nothing. The target need not be lost.
#[test]
fn a_program_that_did_not_run_gives_the_target_time_to_answer() {
    let mut target = ScriptedTarget::new();
    let mut manager = usual_manager(&mut target, 30 * S);
    let mut now = 0;
    pass(&mut manager, &mut target, &mut now, 20 * S);
    let asleep = 3_600 * S;
    now += asleep;
    manager.timeout(now);
    assert!(manager.is_standing(), "it is asked first");
    carry(&mut manager, &mut target, now);
    pass(&mut manager, &mut target, &mut now, asleep + 60 * S);
    assert!(manager.is_standing() && events(&mut manager).is_empty());
    // The target is gone when the machine wakes up.
    target.mute = Some(false);
    now += asleep;
    manager.timeout(now);
    let woken = now;
    let times = loss_times(&mut manager, &mut target, &mut now);
    assert!(times.noticed > woken + 6 * S && times.noticed <= woken + 10 * S, "{times:?}");
    assert_eq!(times.given_up, times.since + 30 * S);
    assert_eq!(times.since, times.noticed - 10 * S, "one limit of silence at most");
}

#[test]
fn p8_a_target_that_stops_answering_is_lost() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    target.mute = Some(false);
    let mut now = 0;
    pass(&mut manager, &mut target, &mut now, 100 * MS + S);
    assert_eq!(events(&mut manager), ["lost"]);
}

#[test]
fn t25_a_volume_that_is_closed_is_released() {
    let mut target = ScriptedTarget::new();
    for claims in [true, false] {
        let mut manager = manager(&mut target, LOSS, claims);
        target.asked.clear();
        manager.stop(0);
        assert!(!manager.is_open(ControlQueue::Admin));
        let last: Vec<u8> =
            manager.outbox(ControlQueue::Admin).slices().flatten().copied().collect();
        target.respond(ControlQueue::Admin, &last);
        assert_eq!(target.asked, if claims { vec![ADMIN_RELEASE] } else { vec![] });
        assert_eq!((manager.deadline(), manager.wants_connection()), (None, None));
        assert!(events(&mut manager).is_empty(), "that is no loss");
    }
}

/// A target may end the connection as soon as it has released the volume. The answer arrives with
/// the end of the connection, before the thread that closes the volume has run.
#[test]
fn the_end_of_a_connection_after_the_release_is_no_loss() {
    for loss_ns in [0, LOSS] {
        let mut target = ScriptedTarget::new();
        let mut manager = manager(&mut target, loss_ns, true);
        manager.request(request(1), 0);
        manager.request_release(VOLUME, 0).expect("it can be asked");
        assert!(!manager.is_released());
        carry(&mut manager, &mut target, 0);
        assert!(target.asked.contains(&ADMIN_RELEASE));
        cut(&mut manager, &mut target, 0);
        assert_eq!(events(&mut manager), ["ended"]);
        assert!(manager.is_released() && manager.absence().is_some_and(|it| it.for_good));
        assert_eq!((manager.deadline(), manager.wants_connection()), (None, None));
    }
}

#[test]
fn a_release_is_requested_once_for_each_association_and_a_refusal_ends_it() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    target.mute = Some(true);
    for _ in 0..3 {
        manager.request_release(VOLUME, 0).expect("it can be asked");
        carry(&mut manager, &mut target, 0);
    }
    assert_eq!(target.asked, [ADMIN_RELEASE]);
    assert_eq!(manager.take_release_refusal(), None);
    // The connection ends without an answer: that is a loss, and the next one is asked again.
    cut(&mut manager, &mut target, 0);
    assert_eq!(events(&mut manager), ["lost"]);
    (target.up, target.mute) = (true, None);
    target.refuse_release = Some(status::STREAM_BUSY.0);
    let mut now = 0;
    pass(&mut manager, &mut target, &mut now, S);
    manager.request_release(VOLUME, now).expect("it can be asked");
    carry(&mut manager, &mut target, now);
    assert_eq!(manager.take_release_refusal().map(|status| status.0), Some(status::STREAM_BUSY.0));
    assert_eq!((manager.take_release_refusal(), manager.is_released()), (None, false));
    target.refuse_release = None;
    manager.request_release(VOLUME, now).expect("it can be asked");
    carry(&mut manager, &mut target, now);
    assert!(manager.is_released());
}

#[test]
fn a_volume_that_is_released_already_is_not_released_again() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    manager.set_released();
    manager.stop(0);
    carry(&mut manager, &mut target, 0);
    assert!(!target.asked.contains(&ADMIN_RELEASE));
}

#[test]
fn one_connection_is_made_at_a_time_and_no_request_is_lost() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    let other = ConnectRequest { stream: StreamId(4), qid: 5, ..request(0) };
    manager.request(request(0), 0);
    manager.request(other, 0);
    manager.timeout(0);
    assert_eq!(manager.wants_connection(), Some(ConnectionId::Stream(StreamId(3))));
    manager.timeout(0);
    assert_eq!(manager.wants_connection(), Some(ConnectionId::Stream(StreamId(3))));
    assert!(manager.deadline().is_none_or(|at| at > 0), "the second waits for the first");
    manager.request(other, 0);
    assert_eq!(manager.wants_connection(), Some(ConnectionId::Stream(StreamId(3))));
    manager.request(request(0), 0);
    assert_eq!(manager.wants_connection(), None, "the stream has asked anew");
    manager.request(other, 0);
    manager.timeout(0);
    assert_eq!(manager.wants_connection(), Some(ConnectionId::Stream(StreamId(3))));
    carry(&mut manager, &mut target, 0);
    manager.timeout(0);
    assert_eq!(manager.wants_connection(), Some(ConnectionId::Stream(StreamId(4))));
    carry(&mut manager, &mut target, 0);
    assert_eq!(events(&mut manager), ["stream", "stream"]);
}

#[test]
fn the_pauses_between_attempts_vary() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    let pauses: Vec<u64> = (0..64)
        .map(|_| {
            manager.request(request(20), 0);
            manager.requests.deadline().expect("a request")
        })
        .collect();
    let mut different = pauses.clone();
    different.sort_unstable();
    different.dedup();
    assert!(different.len() > 32, "{different:?}");
    // From three quarters of the longest pause to all of it.
    assert!(pauses.iter().all(|pause| (750 * MS..=1000 * MS).contains(pause)));
    assert!(pauses.iter().any(|pause| *pause < 850 * MS));
    assert!(pauses.iter().any(|pause| *pause > 900 * MS));
}

#[test]
fn the_length_of_the_next_pdu_is_that_of_the_association() {
    let mut target = ScriptedTarget::new();
    let manager = manager(&mut target, LOSS, true);
    let header = [5, 0, 24, 0, 24, 0, 0, 0];
    assert_eq!(manager.need(ControlQueue::Admin, &header), 24);
}

#[test]
fn p7_a_connection_that_ends_while_a_label_is_read_is_made_again() {
    let mut target = ScriptedTarget::new();
    let mut manager = manager(&mut target, LOSS, true);
    let mut now = 0;
    cut(&mut manager, &mut target, now);
    target.up = true;
    target.mute = Some(true);
    pass(&mut manager, &mut target, &mut now, 100 * MS);
    assert_eq!(target.asked, [0x02], "the label is not answered");
    target.mute = None;
    manager.closed(ControlQueue::Drives, ConnectionEnd::Closed, now);
    // At the next attempt, and not when the answer is overdue.
    pass(&mut manager, &mut target, &mut now, 150 * MS);
    assert!(manager.is_standing());
    assert_eq!(events(&mut manager), ["lost", "back"]);
}

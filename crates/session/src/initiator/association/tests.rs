//! An association with a scripted target.

use super::super::scripted_target::{
    CONNECT_INVALID, INVALID_HOST, MS, NQN, Payload, ScriptedTarget, carry, config, pass,
};
use super::*;
use crate::auth::host::HostSecrets;
use crate::initiator::endpoint::Endpoint;
use alloc::sync::Arc;
use riopipe_nvme::command::Status;
use riopipe_nvme::dhchap_secret::DhchapSecret;
use std::string::ToString;
use std::vec;

use ControlQueue::{Admin, Drives as DrivesQueue};

fn attached(target: &mut ScriptedTarget) -> Association<Payload> {
    let mut association = Association::new(config());
    carry(&mut association, target, 0);
    assert_eq!(association.state(), AssociationState::Attached);
    association
}

/// An association that stands, with its queue to the drives open.
fn with_drives(target: &mut ScriptedTarget) -> Association<Payload> {
    let mut association = attached(target);
    association.open_drives(0);
    carry(&mut association, target, 0);
    assert_eq!(association.drives(), DrivesState::Ready);
    association
}

fn ask(association: &mut Association<Payload>, queue: ControlQueue, name: u64, opcode: u8) {
    let asked = association.ask(queue, name, Sqe::new(opcode, 0), Data::None, 0);
    assert_eq!(asked, Ok(()));
}

fn lost(association: &Association<Payload>) -> AssociationError {
    match association.state() {
        AssociationState::Lost(error) => error.clone(),
        other => panic!("{other:?}"),
    }
}

fn names(association: &mut Association<Payload>) -> Vec<u64> {
    core::iter::from_fn(|| association.next_answer()).map(|answer| answer.question).collect()
}

#[test]
fn the_only_subsystem_is_discovered() {
    let mut target = ScriptedTarget::new();
    let named = config();
    let mut association = Association::new(AssociationConfig { subnqn: None, ..named });
    assert_eq!(association.subnqn(), DISCOVERY_NQN);
    carry(&mut association, &mut target, 0);
    assert!(association.is_attached());
    assert_eq!(association.subnqn(), NQN);
    assert_eq!(association.discovered().map(<[Entry]>::len), Some(1));
    assert!(!association.is_open(ControlQueue::Discovery), "its connection is closed");
    assert_eq!(target.connects, [0, 0]);
}

#[test]
fn of_several_subsystems_one_has_to_be_named() {
    for (subsystems, text) in [
        (
            vec![],
            "the target offers no subsystem to host nqn.2014-08.org.nvmexpress:uuid:1: name one, or \
             have the host put on its list of allowed hosts",
        ),
        (vec!["b", "a", "b"], "the target offers 2 subsystems (a, b): name one of them"),
    ] {
        let mut target = ScriptedTarget { subsystems, ..ScriptedTarget::new() };
        let mut association =
            Association::<Payload>::new(AssociationConfig { subnqn: None, ..config() });
        carry(&mut association, &mut target, 0);
        assert_eq!(lost(&association).to_string(), text);
        assert_eq!(association.subnqn(), DISCOVERY_NQN, "discovery is what has failed");
    }
}

#[test]
fn discovery_alone_attaches_to_nothing() {
    for subsystems in [vec![], vec![NQN], vec!["b", "a"]] {
        let listed = subsystems.len();
        let mut target = ScriptedTarget { subsystems, ..ScriptedTarget::new() };
        let mut association = Association::<Payload>::discover(config());
        carry(&mut association, &mut target, 0);
        assert_eq!(association.discovered().map(<[Entry]>::len), Some(listed));
        assert_eq!((target.connects, association.wants_connection()), (vec![0], None));
    }
}

#[test]
fn data_digests_are_requested_unless_the_connection_is_local() {
    for (wanted, is_local, flags) in
        [(None, true, 0), (None, false, 2), (Some(true), true, 2), (Some(false), false, 0)]
    {
        let mut target = ScriptedTarget::new();
        let mut association =
            Association::<Payload>::new(AssociationConfig { data_digest: wanted, ..config() });
        association.connected(ConnectionId::Control(Admin), is_local, 0);
        let sent: Vec<u8> = association.outbox(Admin).slices().flatten().copied().collect();
        target.respond(Admin, &sent);
        assert_eq!(target.digests, flags, "{wanted:?} {is_local}");
    }
}

#[test]
fn t23_a_late_answer_is_that_of_its_own_question() {
    let mut target = ScriptedTarget { mute: Some(true), ..ScriptedTarget::new() };
    let mut association = attached(&mut target);
    ask(&mut association, Admin, 7, 0xc1);
    ask(&mut association, Admin, 7, 0xc2);
    carry(&mut association, &mut target, 0);
    assert_eq!(association.unanswered(Admin), 2);
    target.mute = None;
    ask(&mut association, Admin, 8, 0xc3);
    carry(&mut association, &mut target, 0);
    let answer = association.next_answer().expect("the third is answered");
    assert_eq!((answer.question, answer.cqe.result()), (8, 0xc3));
    // The completion carries the command's identifier, independent of the caller's name for it.
    let late = target.late();
    association.received(Admin, &late, 0);
    let answer = association.next_answer().expect("the first is answered");
    assert_eq!((answer.question, answer.cqe.result()), (7, 0xc1));
    assert_eq!(association.unanswered(Admin), 1);
}

#[test]
fn t23_a_question_on_an_earlier_connection_is_never_answered() {
    let mut target = ScriptedTarget { mute: Some(true), ..ScriptedTarget::new() };
    let mut association = with_drives(&mut target);
    ask(&mut association, DrivesQueue, 1, 0x00);
    carry(&mut association, &mut target, 0);
    association.close_drives();
    assert!(!association.is_open(DrivesQueue));
    target.mute = None;
    association.received(DrivesQueue, &target.late(), 0);
    association.open_drives(0);
    carry(&mut association, &mut target, 0);
    ask(&mut association, DrivesQueue, 2, 0x00);
    carry(&mut association, &mut target, 0);
    assert_eq!(names(&mut association), [2]);
}

#[test]
fn keep_alive_is_sent_and_its_answers_are_not_reported() {
    let mut target = ScriptedTarget::new();
    let mut association = attached(&mut target);
    let mut now = 0;
    pass(&mut association, &mut target, &mut now, 1000 * MS);
    assert_eq!(target.kept_alive, 10, "each 100 ms");
    assert_eq!(names(&mut association), []);
    assert_eq!(association.unanswered(Admin), 0);
}

#[test]
fn a_target_that_owes_an_answer_for_too_long_is_lost() {
    // Keep Alive, or a question: an answer to one does not count as an answer to the other.
    for keeps_alive in [false, true] {
        let mute = Some(keeps_alive);
        let mut target = ScriptedTarget { mute, ..ScriptedTarget::new() };
        let mut association = attached(&mut target);
        let owed = if keeps_alive { 0 } else { 100 * MS };
        if keeps_alive {
            ask(&mut association, Admin, 1, 0xc1);
        }
        let mut now = 0;
        pass(&mut association, &mut target, &mut now, owed + 1000 * MS - 1);
        assert!(association.is_attached(), "{keeps_alive}");
        pass(&mut association, &mut target, &mut now, owed + 1000 * MS);
        assert_eq!(lost(&association), AssociationError::TimedOut(1000 * MS));
        let text = "no answer within 1 s: the target stalls, or is no NVMe/TCP target";
        assert_eq!(lost(&association).to_string(), text);
        assert!(!association.is_open(Admin));
    }
}

#[test]
fn a_target_that_makes_progress_is_not_given_up() {
    let mut target = ScriptedTarget { mute: Some(true), ..ScriptedTarget::new() };
    let mut association = attached(&mut target);
    for name in 0..8 {
        ask(&mut association, Admin, name, 0xc1);
    }
    let mut now = 0;
    for step in 1..=8 {
        pass(&mut association, &mut target, &mut now, step * 900 * MS);
        association.received(Admin, &target.late(), now);
    }
    assert_eq!(names(&mut association), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!(association.is_attached());
}

#[test]
fn an_extended_answer_limit_leaves_space_for_questions() {
    let mut target = ScriptedTarget { mute: Some(false), ..ScriptedTarget::new() };
    let mut association = attached(&mut target);
    association.extend_answer_limit();
    let mut now = 0;
    let over = 100 * MS + EXTENDED_FACTOR * 1000 * MS;
    pass(&mut association, &mut target, &mut now, over - 1);
    assert!(association.is_attached());
    assert_eq!(target.kept_alive, 3, "the commands that it has not read yet are enough");
    for name in 0..20 {
        ask(&mut association, Admin, name, 0xc1);
    }
    let full = (0..20)
        .find_map(|name| association.ask(Admin, name, Sqe::new(0xc1, 0), Data::None, now).err());
    assert_eq!(full, Some(AskError::Full { unanswered: 31 }));
    // A machine whose power was cut never answers.
    pass(&mut association, &mut target, &mut now, over);
    assert_eq!(lost(&association), AssociationError::TimedOut(EXTENDED_FACTOR * 1000 * MS));
}

#[test]
fn a_drop_reports_whether_the_keep_alive_ran_out() {
    let mut target = ScriptedTarget::new();
    let broken = ConnectionEnd::Broken("reset".into());
    let mut association = attached(&mut target);
    association.closed(Admin, ConnectionEnd::Closed, 200 * MS);
    let AssociationError::Dropped(loss) = lost(&association) else { panic!() };
    assert!(!loss.ran_out());
    let mut association = attached(&mut target);
    association.closed(Admin, broken.clone(), 200 * MS);
    assert_eq!(lost(&association).to_string(), "reset");
    // No command was sent for longer than the target waits: that is the cause, however it ended.
    let mut association = attached(&mut target);
    association.closed(Admin, broken, 400 * MS);
    let AssociationError::Dropped(loss) = lost(&association) else { panic!() };
    assert!(loss.ran_out());
}

#[test]
fn without_a_connection_or_a_bring_up_there_is_no_association() {
    let mut target = ScriptedTarget { up: false, ..ScriptedTarget::new() };
    let mut association = Association::<Payload>::new(config());
    carry(&mut association, &mut target, 0);
    assert_eq!(lost(&association).to_string(), "nothing listens there");

    // A program accepts the connection, and sends nothing.
    let mut association = Association::<Payload>::new(config());
    association.connected(ConnectionId::Control(Admin), true, 5);
    assert_eq!(association.deadline(), Some(1000 * MS + 5));
    association.timeout(1000 * MS + 4);
    assert_eq!(association.state(), AssociationState::Attaching);
    association.timeout(1000 * MS + 5);
    assert_eq!(lost(&association), AssociationError::TimedOut(1000 * MS));

    // A program accepts the connection and closes it.
    let mut association = Association::<Payload>::new(config());
    association.connected(ConnectionId::Control(Admin), true, 5);
    association.closed(Admin, ConnectionEnd::Closed, 6);
    assert_eq!(lost(&association), AssociationError::Closed);
    assert_eq!(association.wants_connection(), None, "the next attempt is another association");
}

#[test]
fn t8_the_queue_to_the_drives_is_taken_when_its_last_use_has_ended() {
    let mut target = ScriptedTarget { refusals: vec![CONNECT_INVALID; 3], ..ScriptedTarget::new() };
    let mut association = attached(&mut target);
    association.open_drives(0);
    let mut now = 0;
    pass(&mut association, &mut target, &mut now, 5 * MS);
    assert_eq!(association.drives(), DrivesState::Opening);
    assert_eq!(target.connects, [0, 1, 1, 1], "always the same queue");
    pass(&mut association, &mut target, &mut now, 6 * MS);
    assert_eq!(association.drives(), DrivesState::Ready);
}

#[test]
fn the_queue_to_the_drives_is_not_requested_for_ever() {
    let refusals = vec![CONNECT_INVALID; 10_000];
    let mut target = ScriptedTarget { refusals, ..ScriptedTarget::new() };
    let mut association = attached(&mut target);
    association.open_drives(0);
    let mut now = 0;
    pass(&mut association, &mut target, &mut now, 999 * MS);
    assert_eq!(association.drives(), DrivesState::Opening);
    pass(&mut association, &mut target, &mut now, 1001 * MS);
    let DrivesState::Failed(AssociationError::Session(_)) = association.drives() else { panic!() };
    assert!(association.is_attached(), "only that queue has failed");

    // A refusal that does not pass is not tried again.
    target.refusals = vec![INVALID_HOST];
    target.connects.clear();
    association.open_drives(now);
    pass(&mut association, &mut target, &mut now, 1010 * MS);
    assert!(matches!(association.drives(), DrivesState::Failed(_)));
    assert_eq!(target.connects, [1]);
    association.open_drives(now);
    carry(&mut association, &mut target, now);
    assert_eq!(association.drives(), DrivesState::Ready);
}

#[test]
fn a_queue_to_the_drives_that_owes_an_answer_fails_alone() {
    let mut target = ScriptedTarget { mute: Some(true), ..ScriptedTarget::new() };
    let mut association = with_drives(&mut target);
    ask(&mut association, DrivesQueue, 1, 0x00);
    let mut now = 0;
    pass(&mut association, &mut target, &mut now, 1000 * MS - 1);
    assert_eq!(association.drives(), DrivesState::Ready);
    pass(&mut association, &mut target, &mut now, 1000 * MS);
    let timed_out = AssociationError::TimedOut(1000 * MS);
    assert_eq!(association.drives(), DrivesState::Failed(&timed_out));
    assert!(association.is_attached());
    assert_eq!(
        association.ask(DrivesQueue, 2, Sqe::flush(1), Data::None, now),
        Err(AskError::NotReady)
    );
}

#[test]
fn a_last_pdu_is_left_to_be_sent() {
    let mut target = ScriptedTarget::new();
    let mut association = with_drives(&mut target);
    ask(&mut association, Admin, 1, 0xc4);
    ask(&mut association, DrivesQueue, 1, 0x08);
    association.close();
    assert_eq!(lost(&association), AssociationError::ClosedHere);
    for queue in ControlQueue::ALL {
        assert!(!association.is_open(queue));
    }
    assert!(!association.outbox(Admin).is_empty());
    assert!(association.outbox(DrivesQueue).is_empty(), "no zeroes after the end");
    assert_eq!(association.deadline(), None);

    // A target that breaks the protocol gets a report of it.
    let mut association = attached(&mut target);
    association.received(Admin, &[9, 0, 8, 0, 8, 0, 0, 0], 0);
    let AssociationError::Session(_) = lost(&association) else { panic!() };
    assert!(!association.outbox(Admin).is_empty());
}

#[test]
fn streams_get_queues_as_large_as_the_controller_takes() {
    let mut target = ScriptedTarget::new();
    let mut association = Association::<Payload>::new(config());
    assert!(association.io_queue(2, 8).is_none(), "not before it stands");
    carry(&mut association, &mut target, 0);
    let queue = association.io_queue(2, 8).expect("it stands");
    let config = queue.config;
    assert_eq!((config.qid, config.sqsize, config.cntlid), (2, 9, 0x0203));
    let queue = association.io_queue(3, 5000).expect("it stands");
    assert_eq!(queue.config.sqsize, 101);
    association.close();
    assert!(association.io_queue(2, 8).is_none(), "nor after its end");
    assert!(association.controller().is_some(), "its properties are still known");
}

#[test]
fn failures_of_commands_are_answers() {
    let mut target = ScriptedTarget { label_status: 0x281, ..ScriptedTarget::new() };
    let mut association = with_drives(&mut target);
    association.ask(DrivesQueue, 4, Sqe::read(1, 0, 2), Data::Read(8192), 0).expect("space");
    carry(&mut association, &mut target, 0);
    let answer = association.next_answer().expect("an answer");
    assert_eq!((answer.question, answer.cqe.status()), (4, Status(0x281)));
    target.label_status = 0;
    association.ask(DrivesQueue, 5, Sqe::read(1, 0, 2), Data::Read(8192), 0).expect("space");
    carry(&mut association, &mut target, 0);
    let answer = association.next_answer().expect("an answer");
    assert_eq!((answer.queue, answer.question, answer.page.len()), (DrivesQueue, 5, 8192));
    assert_eq!(answer.page[8], 1, "the version of a label");
}

#[test]
fn the_queue_to_the_drives_is_opened_once_and_only_when_attached() {
    let mut target = ScriptedTarget::new();
    let mut association = Association::<Payload>::new(config());
    association.open_drives(0);
    assert_eq!(association.drives(), DrivesState::Closed, "there is no controller yet");
    let mut association = with_drives(&mut target);
    association.open_drives(0);
    assert_eq!(association.drives(), DrivesState::Ready, "it is open already");
}

#[test]
fn closing_the_queue_to_the_drives_drops_its_answers_alone() {
    let mut target = ScriptedTarget::new();
    let mut association = with_drives(&mut target);
    ask(&mut association, DrivesQueue, 1, 0x00);
    ask(&mut association, Admin, 2, 0xc1);
    assert_eq!(association.unanswered(DrivesQueue), 1);
    carry(&mut association, &mut target, 0);
    assert_eq!(association.unanswered(DrivesQueue), 0);
    association.close_drives();
    assert_eq!(names(&mut association), [2]);
}

#[test]
fn a_queue_to_the_drives_that_is_closed_fails_alone() {
    let mut target = ScriptedTarget::new();
    let mut association = with_drives(&mut target);
    association.closed(DrivesQueue, ConnectionEnd::Closed, 0);
    assert_eq!(association.drives(), DrivesState::Failed(&AssociationError::Closed));
    assert!(association.is_attached());
}

#[test]
fn what_a_failed_queue_to_the_drives_leaves_behind() {
    // A connection that has ended: nothing is sent, and only its own answers are dropped.
    let mut target = ScriptedTarget::new();
    let mut association = with_drives(&mut target);
    ask(&mut association, DrivesQueue, 1, 0x00);
    ask(&mut association, Admin, 2, 0xc1);
    carry(&mut association, &mut target, 0);
    ask(&mut association, DrivesQueue, 3, 0x08);
    association.closed(DrivesQueue, ConnectionEnd::Closed, 0);
    assert!(association.outbox(DrivesQueue).is_empty());
    assert_eq!(names(&mut association), [2]);
    // A target that breaks the protocol there gets a report of it.
    let mut association = with_drives(&mut target);
    association.received(DrivesQueue, &[9, 0, 8, 0, 8, 0, 0, 0], 0);
    assert!(matches!(association.drives(), DrivesState::Failed(AssociationError::Session(_))));
    assert!(association.is_attached());
    assert!(!association.outbox(DrivesQueue).is_empty());
}

#[test]
fn the_queue_to_the_drives_has_to_be_started_in_time() {
    let mut target = ScriptedTarget::new();
    let mut association = attached(&mut target);
    association.open_drives(0);
    let wanted = ConnectionId::Control(DrivesQueue);
    assert_eq!(association.wants_connection(), Some(wanted));
    association.connected(wanted, true, 0);
    association.timeout(1000 * MS - 1);
    assert_eq!(association.drives(), DrivesState::Opening);
    association.timeout(1000 * MS);
    let timed_out = AssociationError::TimedOut(1000 * MS);
    assert_eq!(association.drives(), DrivesState::Failed(&timed_out));
}

#[test]
fn a_refused_queue_to_the_drives_is_requested_after_a_pause() {
    let mut target = ScriptedTarget { refusals: vec![CONNECT_INVALID], ..ScriptedTarget::new() };
    let mut association = attached(&mut target);
    association.open_drives(0);
    carry(&mut association, &mut target, 0);
    association.timeout(2 * MS - 1);
    assert_eq!(association.wants_connection(), None);
    association.timeout(2 * MS);
    assert_eq!(association.wants_connection(), Some(ConnectionId::Control(DrivesQueue)));
}

#[test]
fn a_discovery_service_that_does_not_answer_is_given_up() {
    let mut association =
        Association::<Payload>::new(AssociationConfig { subnqn: None, ..config() });
    association.connected(ConnectionId::Control(ControlQueue::Discovery), true, 5);
    assert_eq!(association.deadline(), Some(1000 * MS + 5));
    association.timeout(1000 * MS + 4);
    assert!(association.is_open(ControlQueue::Discovery));
    association.timeout(1000 * MS + 5);
    assert_eq!(lost(&association), AssociationError::TimedOut(1000 * MS));
}

#[test]
fn each_queue_reports_the_length_of_the_next_pdu() {
    // A completion capsule is 24 bytes long; the header has the length in bytes 4 to 7.
    let header = [5, 0, 24, 0, 24, 0, 0, 0];
    let handshake = [1, 0, 128, 0, 128, 0, 0, 0];
    let mut association =
        Association::<Payload>::new(AssociationConfig { subnqn: None, ..config() });
    assert_eq!(association.need(ControlQueue::Discovery, &handshake), 0, "no connection");
    association.connected(ConnectionId::Control(ControlQueue::Discovery), true, 0);
    assert_eq!(association.need(ControlQueue::Discovery, &handshake), 128);
    let mut association = Association::<Payload>::new(config());
    association.connected(ConnectionId::Control(Admin), true, 0);
    assert_eq!(association.need(Admin, &handshake), 128);
    let mut target = ScriptedTarget::new();
    let association = with_drives(&mut target);
    for queue in [Admin, DrivesQueue] {
        assert_eq!(association.need(queue, &header), 24, "{queue:?}");
    }
    assert_eq!(association.need(ControlQueue::Discovery, &header), 0);
}

/// A target may close the connection instead of giving a reason, and does not answer a host that has given up.
#[test]
fn an_authentication_that_is_cut_short_is_named_as_the_reason() {
    let secret = DhchapSecret::new(&[7; 32], None).unwrap();
    let secrets = HostSecrets { host: secret, controller: None, random: |bytes| bytes.fill(5) };
    let secrets = Some(Arc::new(secrets));
    let cut_short = "the target closed the connection before the authentication had ended";
    for (answers, text) in [(0, cut_short), (1, cut_short), (2, "sent a malformed message")] {
        let mut target = ScriptedTarget { authentication: Some(answers), ..ScriptedTarget::new() };
        let config = AssociationConfig { secrets: secrets.clone(), ..config() };
        let mut association = Association::<Payload>::new(config);
        carry(&mut association, &mut target, 0);
        association.closed(Admin, ConnectionEnd::Closed, 0);
        let error = lost(&association).to_string();
        assert!(error.contains("did not authenticate") && error.contains(text), "{error}");
    }
}

//! Both sides against each other. The bytes on the wire and the responses have tests of their own, against
//! values of other programs.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU8, Ordering};

use super::*;
use crate::auth::host::{HostAuth, HostAuthError, HostSecrets, HostStep};

const HOST: &str = "nqn.2026-01.io.example:host";
const SUBSYSTEM: &str = "nqn.2026-01.io.example:drives";

fn random(bytes: &mut [u8]) {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    for byte in bytes {
        *byte = NEXT.fetch_add(1, Ordering::Relaxed);
    }
}

fn secret(byte: u8) -> DhchapSecret {
    DhchapSecret::new(&[byte; 48], Some(HashId::Sha384)).unwrap()
}

fn rules(hash: HashId, group: GroupId) -> AuthRules {
    AuthRules {
        controller: Some(secret(2)),
        hashes: vec![hash],
        groups: vec![group],
        ..AuthRules::new(random)
    }
}

/// The end of an exchange.
#[derive(Debug, PartialEq)]
enum End {
    Succeeded,
    /// The target's reason, and the host's error.
    Refused(&'static str, HostAuthError),
    /// The host has given up.
    HostGaveUp(HostAuthError),
}

fn exchange(host: u8, controller: Option<u8>, rules: &AuthRules) -> End {
    let secrets = HostSecrets { host: secret(host), controller: controller.map(secret), random };
    let (mut host, mut message) = HostAuth::begin(Arc::new(secrets), HOST, SUBSYSTEM);
    let mut target = ControllerAuth::new(HOST, SUBSYSTEM);
    let mut why = None;
    loop {
        match target.on_sent(&message, &secret(1), rules) {
            Sent::Accepted => {}
            Sent::Job(job) => {
                assert!(target.is_computing());
                assert!(matches!(target.on_receive(rules), Received::Wait));
                why = why.or(target.on_dh_done(job.run(), &secret(1)));
                assert!(!target.is_computing());
            }
            Sent::Failed(reason) => why = Some(reason),
            other => panic!("{other:?}"),
        }
        let (bytes, is_success) = match target.on_receive(rules) {
            Received::Message(bytes) => (bytes, false),
            Received::Success(bytes) => (bytes, true),
            Received::Failure(bytes, None) => {
                let Err(error) = host.on_received(&bytes) else { panic!("a success") };
                return End::Refused(why.unwrap(), error);
            }
            other => panic!("{other:?}"),
        };
        match host.on_received(&bytes) {
            Ok(HostStep::SendAndReceive(next)) => message = next,
            Ok(HostStep::SendLast(last)) => {
                assert!(!is_success);
                assert!(matches!(target.on_sent(&last, &secret(1), rules), Sent::Succeeded));
                assert!(!target.is_running());
                return End::Succeeded;
            }
            Ok(HostStep::Done) => {
                assert!(is_success && !target.is_running());
                return End::Succeeded;
            }
            Err(error) => {
                let HostAuthError::GivenUp(_, failure) = error else { panic!("{error}") };
                let sent = target.on_sent(&host.failure(failure), &secret(1), rules);
                assert!(matches!(sent, Sent::GivenUp(found) if found == failure));
                return End::HostGaveUp(error);
            }
        }
    }
}

#[test]
fn every_hash_and_group_in_one_direction_and_in_both() {
    for hash in HashId::ALL {
        for group in [GroupId::Null, GroupId::Ffdhe2048, GroupId::Ffdhe3072] {
            let rules = rules(hash, group);
            assert_eq!(exchange(1, None, &rules), End::Succeeded, "{hash:?} {group:?}");
            assert_eq!(exchange(1, Some(2), &rules), End::Succeeded, "{hash:?} {group:?}");
        }
    }
    for group in [GroupId::Ffdhe4096, GroupId::Ffdhe6144, GroupId::Ffdhe8192] {
        assert_eq!(exchange(1, Some(2), &rules(HashId::Sha512, group)), End::Succeeded);
    }
}

#[test]
fn a_wrong_secret_of_either_side_is_found() {
    for group in [GroupId::Null, GroupId::Ffdhe2048] {
        let rules = rules(HashId::Sha256, group);
        let refused = HostAuthError::Refused(AuthFailure::Failed);
        assert_eq!(exchange(9, None, &rules), End::Refused(WRONG_RESPONSE, refused));
        let End::HostGaveUp(error) = exchange(1, Some(9), &rules) else { panic!("accepted") };
        assert!(error.to_string().contains("could not prove its identity"), "{error}");
        let none = AuthRules { controller: None, ..rules };
        let End::Refused(why, _) = exchange(1, Some(2), &none) else { panic!("accepted") };
        assert!(why.contains("no secret of the target"), "{why}");
        assert_eq!(exchange(1, None, &none), End::Succeeded);
    }
}

use alloc::string::ToString;

/// The target's reason for a message that follows the challenge, made by `change` of the right Reply.
fn after_challenge(change: impl FnOnce(&mut Vec<u8>, &[u8])) -> Option<&'static str> {
    let rules = rules(HashId::Sha256, GroupId::Null);
    let secrets = HostSecrets { host: secret(1), controller: Some(secret(2)), random };
    let (mut host, message) = HostAuth::begin(Arc::new(secrets), HOST, SUBSYSTEM);
    let mut target = ControllerAuth::new(HOST, SUBSYSTEM);
    assert!(matches!(target.on_sent(&message, &secret(1), &rules), Sent::Accepted));
    let Received::Message(challenge) = target.on_receive(&rules) else { panic!("no challenge") };
    let Ok(HostStep::SendAndReceive(mut reply)) = host.on_received(&challenge) else { panic!() };
    change(&mut reply, &challenge[16..48]);
    match target.on_sent(&reply, &secret(1), &rules) {
        Sent::Accepted => None,
        Sent::Failed(why) => {
            assert!(matches!(target.on_receive(&rules), Received::Failure(_, None)));
            Some(why)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn t18_a_wrong_message_ends_the_transaction() {
    assert_eq!(after_challenge(|_, _| {}), None);
    assert_eq!(after_challenge(|reply, _| reply.truncate(20)), Some(MALFORMED));
    assert_eq!(after_challenge(|reply, _| reply[4] ^= 1), Some(OUT_OF_TURN));
    assert_eq!(after_challenge(|reply, _| reply[16] ^= 1), Some(WRONG_RESPONSE));
    // Another sequence number of the host changes the target's response only.
    assert_eq!(after_challenge(|reply, _| reply[12] ^= 1), None);
    // A Reply with a DH value where none was agreed on.
    let with_value = |reply: &mut Vec<u8>, _: &[u8]| {
        reply[10] = 4;
        reply.extend([1; 4]);
    };
    assert_eq!(after_challenge(with_value), Some(MALFORMED));
    let reflected = |reply: &mut Vec<u8>, challenge: &[u8]| {
        reply[48..80].copy_from_slice(challenge);
    };
    assert!(after_challenge(reflected).is_some_and(|why| why.contains("own challenge")));
    let success2 = |reply: &mut Vec<u8>, _: &[u8]| {
        let transaction = u16::from_le_bytes([reply[4], reply[5]]);
        *reply = AuthMessage::Success2.encode(transaction, 0);
    };
    assert_eq!(after_challenge(success2), Some(OUT_OF_TURN), "a host skips its proof");
}

#[test]
fn t18_messages_out_of_turn_never_succeed() {
    let rules = rules(HashId::Sha256, GroupId::Null);
    let mut target = ControllerAuth::new(HOST, SUBSYSTEM);
    let Received::Failure(_, Some(why)) = target.on_receive(&rules) else { panic!() };
    assert_eq!(why, OUT_OF_TURN);
    for message in [AuthMessage::Success2, AuthMessage::Success1 { response: None }] {
        let mut target = ControllerAuth::new(HOST, SUBSYSTEM);
        let sent = target.on_sent(&message.encode(0, 32), &secret(1), &rules);
        assert!(matches!(sent, Sent::Failed(OUT_OF_TURN)), "{sent:?}");
    }
}

#[test]
fn without_anything_in_common_the_host_learns_what_is_missing() {
    let rules = AuthRules { hashes: Vec::new(), ..AuthRules::new(random) };
    let End::Refused(_, error) = exchange(1, None, &rules) else { panic!("accepted") };
    assert_eq!(error, HostAuthError::Refused(AuthFailure::Hash));
    let rules = AuthRules { groups: Vec::new(), ..AuthRules::new(random) };
    let End::Refused(_, error) = exchange(1, None, &rules) else { panic!("accepted") };
    assert_eq!(error, HostAuthError::Refused(AuthFailure::Group));
}

/// A job whose result comes after the host has begun again belongs to nothing.
#[test]
fn the_result_of_a_job_that_is_over_is_ignored() {
    let rules = rules(HashId::Sha256, GroupId::Ffdhe2048);
    let secrets = HostSecrets { host: secret(1), controller: None, random };
    let (_, message) = HostAuth::begin(Arc::new(secrets), HOST, SUBSYSTEM);
    let mut target = ControllerAuth::new(HOST, SUBSYSTEM);
    let Sent::Job(first) = target.on_sent(&message, &secret(1), &rules) else { panic!() };
    let Sent::Job(second) = target.on_sent(&message, &secret(1), &rules) else { panic!() };
    assert_eq!(target.on_dh_done(first.run(), &secret(1)), None);
    assert!(target.is_computing());
    assert_eq!(target.on_dh_done(second.run(), &secret(1)), None);
    assert!(matches!(target.on_receive(&rules), Received::Message(_)));
}

#[test]
fn no_formatting_shows_a_secret() {
    let secrets = HostSecrets { host: secret(0xab), controller: Some(secret(0xab)), random };
    let rules = AuthRules { controller: Some(secret(0xab)), ..AuthRules::new(random) };
    let (host, _) = HostAuth::begin(Arc::new(secrets.clone()), HOST, SUBSYSTEM);
    let text = std::format!("{secrets:?} {rules:?} {host:?} {:?}", secret(0xab));
    assert!(!text.contains("171") && !text.contains("abab"), "{text}");
}

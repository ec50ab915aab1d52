//! Recovering streams of an open volume, acknowledging, and releasing the volume.

use riopipe_order::attribute::{Member, Seq, StreamId};
use riopipe_order::recovery::DriveExtent;
use riopipe_order::topology::{MemberInfo, ServerInfo, Topology};
use riopipe_session::initiator::association::{ConnectionEnd, ControlQueue};
use riopipe_session::initiator::endpoint::Endpoint;
use riopipe_session::initiator::manager::{AssociationManager, ManagerConfig};
use riopipe_session::initiator::opening::{Mode, Opening, OpeningConfig, OpeningError, Outcome};
use riopipe_session::initiator::reconnect::BackOff;
use riopipe_session::initiator::volume::opening::VolumeOpeningConfig;
use riopipe_session::initiator::volume::ranges::{BlockRange, volume_ranges};
use riopipe_session::initiator::volume::recovery::{RecoveryDriver, RecoveryError};
use riopipe_session::initiator::volume::streams::{
    StreamsRecovery, StreamsRecoveryError, VolumeRelease,
};
use riopipe_session::label::DATA_START;
use riopipe_session::wire::status;

use crate::cluster::{Cluster, Opened, S, TIMEOUT, Wires, opening, rival};
use crate::world::{Drive, VOLUME, World, attribute, block, ordered};

type Manager = AssociationManager<Vec<u8>>;

/// An open volume and its owner.
struct Owner {
    cluster: Cluster,
    wires: Wires,
    managers: Vec<Manager>,
    config: OpeningConfig,
    generation: u32,
    attempt: u32,
}

impl Owner {
    fn new(targets: usize, loss_ns: u64) -> Self {
        let mut cluster = Cluster::with_volume(targets);
        let Opened { volume: opened, associations, wires } =
            cluster.open(opening(targets)).opened();
        let managers = associations.into_iter().enumerate().map(|(target, association)| {
            let known = opened.known_target(target);
            let claim = opened.resume_claim(target);
            let back_off = BackOff::default();
            let config = ManagerConfig { known, claim, loss_ns, back_off, seed: 7 };
            AssociationManager::new(association, config)
        });
        let managers = managers.collect();
        let (config, generation) = (opened.opening_config(), opened.generation);
        let mut owner = Self { cluster, wires, managers, config, generation, attempt: 0 };
        // The queues to the drives end.
        owner.carry();
        owner
    }

    fn carry(&mut self) -> bool {
        let mut moved = false;
        for (target, manager) in self.managers.iter_mut().enumerate() {
            moved |= self.cluster.carry(target, manager, &mut self.wires);
        }
        moved
    }

    /// Writes groups 1 and 3 of stream 0 to the first drive, and leaves the stream.
    fn leave_a_gap(&mut self) {
        let cntlid = self.managers[0].controller().expect("attached").cntlid;
        let world = &mut self.cluster.worlds[0];
        let io = world.io(cntlid, 2);
        assert_eq!(world.bind(io, 0, self.generation, 0).status, 0);
        for (ordinal, seq) in [(1, 1), (2, 3)] {
            let mut write = attribute(seq, DATA_START + seq - 1);
            write.ordinal = ordinal;
            let sqe = ordered(seq as u16, &write, 0);
            assert_eq!(world.call(io, sqe, &block(seq as u8)).status, 0);
        }
        world.hang_up(io);
    }

    fn begin(&mut self) -> StreamsRecovery {
        let opening = self.next_opening();
        StreamsRecovery::new(opening, self.attempt, TIMEOUT, self.cluster.now)
    }

    fn next_opening(&mut self) -> Opening {
        self.attempt += 1;
        let mode = Mode::Reopen { generation: self.generation, streams: vec![StreamId(0)] };
        Opening::new(self.config.clone(), mode, self.attempt).expect("all are there")
    }

    /// The connections that the targets have ever got.
    fn connections(&self) -> usize {
        self.cluster.worlds.iter().map(|world| world.links.len()).sum()
    }

    /// Goes on until it ends.
    fn run(&mut self, mut recovery: StreamsRecovery) -> Result<Outcome, StreamsRecoveryError> {
        loop {
            let (now, managers) = (self.cluster.now, &mut self.managers);
            recovery.advance(now, |server, work| work(&mut managers[server]))?;
            if recovery.is_over() {
                self.managers.iter_mut().for_each(StreamsRecovery::close_drives_queue);
                self.carry();
                return Ok(recovery.finish().0);
            }
            if !self.carry() {
                let managers = self.managers.iter().filter_map(Manager::deadline);
                let due = managers.chain(recovery.deadline(self.cluster.now)).min();
                self.cluster.go_to(due.expect("something is to come"));
                let now = self.cluster.now;
                self.managers.iter_mut().for_each(|manager| manager.timeout(now));
            }
        }
    }
}

#[test]
fn a_stream_of_an_open_volume_is_recovered() {
    let mut owner = Owner::new(2, 0);
    owner.leave_a_gap();
    let recovery = owner.begin();
    let outcome = owner.run(recovery).expect("it is recovered");
    assert_eq!((outcome.streams[0].plan.k, outcome.counts.undone_blocks), (Seq(1), 1));
    assert_eq!(owner.cluster.byte(0, 0, DATA_START + 2), 0);
    assert!(owner.managers.iter().all(|manager| !manager.is_open(ControlQueue::Drives)));
    // Again: there is nothing to do, and no drive is asked.
    let connections = owner.connections();
    let recovery = owner.begin();
    let outcome = owner.run(recovery).expect("it is recovered again");
    assert_eq!((outcome.streams[0].plan.k, outcome.counts.undos), (Seq(1), 0));
    assert_eq!(owner.connections(), connections, "no queue to a drive was opened");
}

#[test]
fn the_time_of_the_decision_is_counted_by_itself() {
    let mut owner = Owner::new(1, 0);
    owner.leave_a_gap();
    let mut recovery = owner.begin();
    while !recovery.is_over() {
        if recovery.driver().phase().is_pause() {
            let decided = owner.cluster.now + 7;
            owner.cluster.go_to(decided);
        }
        let (now, managers) = (owner.cluster.now, &mut owner.managers);
        recovery.advance(now, |server, work| work(&mut managers[server])).unwrap();
        owner.carry();
    }
    let (_, times) = recovery.finish();
    assert_eq!((times.decide, times.undo), (7, 0));
}

#[test]
fn p8_a_target_may_put_commands_off_for_the_whole_time_and_no_longer() {
    let mut owner = Owner::new(1, 0);
    let opening = owner.next_opening();
    let mut driver = RecoveryDriver::new(opening, owner.attempt, TIMEOUT, 0);
    let mut put_off = |now| {
        let (ticket, _) = driver.next_command(0, now).expect("it is due");
        driver.on_answer(0, ticket, Err(status::STREAM_BUSY), now)
    };
    assert_eq!([0, TIMEOUT].map(&mut put_off), [Ok(()), Ok(())]);
    let too_long = put_off(2 * TIMEOUT);
    assert!(matches!(too_long, Err(RecoveryError::PutOff { server: 0, .. })), "{too_long:?}");
}

#[test]
fn blocks_of_drives_are_blocks_of_the_volume_wherever_the_data_area_begins() {
    for start in [0, 1, DATA_START, DATA_START + 1] {
        let drive =
            MemberInfo { server: 0, start, blocks: 64, request_blocks_max: 32, volatile: false };
        let topology = Topology::new(vec![drive, drive], vec![ServerInfo { slots: 8 }], 4).unwrap();
        let at = |block, blocks| DriveExtent { member: Member(0), lba: start + block, blocks };
        // The first stripe unit of the drive has the volume's blocks 0–3, the second one 8–11.
        let ranges = volume_ranges(&topology, &[at(0, 1), at(2, 4)]);
        let expected = [(0, 1), (2, 2), (8, 2)].map(|(lba, blocks)| BlockRange { lba, blocks });
        assert_eq!(ranges, expected, "{start}");
    }
}

#[test]
fn t8_zeroes_of_an_attempt_that_was_given_up_come_before_those_of_the_next() {
    let mut owner = Owner::new(1, 0);
    owner.leave_a_gap();
    fn drive(owner: &mut Owner) -> &mut Drive {
        &mut owner.cluster.worlds[0].host.drives[0]
    }
    drive(&mut owner).holds = true;
    let mut first = owner.begin();
    while drive(&mut owner).pending.is_empty() {
        let (now, managers) = (owner.cluster.now, &mut owner.managers);
        first.advance(now, |server, work| work(&mut managers[server])).unwrap();
        owner.carry();
    }
    drop(first);
    let mut second = owner.begin();
    for _ in 0..20 {
        let now = owner.cluster.now + S / 1000;
        owner.cluster.go_to(now);
        let managers = &mut owner.managers;
        second.advance(now, |server, work| work(&mut managers[server])).unwrap();
        owner.managers.iter_mut().for_each(|manager| manager.timeout(now));
        while owner.carry() {}
    }
    assert_eq!(drive(&mut owner).pending.len(), 1, "nothing more is asked of the drive");
    drive(&mut owner).holds = false;
    owner.cluster.worlds[0].complete_all(0);
    let outcome = owner.run(second).expect("now it goes on");
    assert_eq!(outcome.counts.undone_blocks, 1);
}

#[test]
fn a_target_that_is_lost_ends_the_attempt() {
    let mut owner = Owner::new(2, 60 * S);
    owner.leave_a_gap();
    let recovery = owner.begin();
    owner.cluster.down[1] = true;
    let mut wires = std::mem::take(&mut owner.wires);
    owner.cluster.cut(&mut wires);
    let now = owner.cluster.now;
    for manager in &mut owner.managers {
        manager.closed(ControlQueue::Admin, ConnectionEnd::Closed, now);
    }
    let error = owner.run(recovery).unwrap_err();
    assert_eq!(error, StreamsRecoveryError::Unreachable { server: 0 });
}

#[test]
fn t8_a_fenced_owner_recovers_nothing() {
    let mut owner = Owner::new(1, 0);
    owner.leave_a_gap();
    let taking = rival(VolumeOpeningConfig { take_over: true, ..opening(1) });
    let _new = owner.cluster.open(taking).opened();
    let recovery = owner.begin();
    let error = owner.run(recovery).unwrap_err();
    let taken = matches!(error, StreamsRecoveryError::Opening(OpeningError::TakenOver { .. }));
    assert!(taken, "{error}");
}

#[test]
fn a_volume_is_released_on_all_targets() {
    let mut owner = Owner::new(2, 0);
    let mut release = VolumeRelease::new(VOLUME, vec![true, true]);
    for _ in 0..3 {
        let (now, managers) = (owner.cluster.now, &mut owner.managers);
        if release.advance(now, |server, work| work(&mut managers[server])).unwrap() {
            break;
        }
        owner.carry();
    }
    let owned = |w: &World| w.host.shared.volumes().owner(VOLUME).is_some();
    assert!(!owner.cluster.worlds.iter().any(owned));
}

/// The connections of all associations break.
fn cut(owner: &mut Owner) {
    let mut wires = std::mem::take(&mut owner.wires);
    owner.cluster.cut(&mut wires);
    let now = owner.cluster.now;
    for manager in &mut owner.managers {
        manager.closed(ControlQueue::Admin, ConnectionEnd::Closed, now);
    }
}

/// Continues a release until it ends, or until `until` holds.
fn release_until(
    owner: &mut Owner,
    release: &mut VolumeRelease,
    until: impl Fn(&VolumeRelease) -> bool,
) -> Result<bool, StreamsRecoveryError> {
    loop {
        let (now, managers) = (owner.cluster.now, &mut owner.managers);
        if release.advance(now, |server, work| work(&mut managers[server]))? {
            return Ok(true);
        }
        if until(release) {
            return Ok(false);
        }
        if !owner.carry() {
            let due = owner.managers.iter().filter_map(Manager::deadline).min();
            owner.cluster.go_to(due.expect("the targets are tried again"));
            let now = owner.cluster.now;
            owner.managers.iter_mut().for_each(|manager| manager.timeout(now));
        }
    }
}

/// Releases the volume while all associations end after the command and before the answer.
fn release_across_a_loss(loss_ns: u64) -> (Owner, Result<(), StreamsRecoveryError>) {
    let mut owner = Owner::new(2, loss_ns);
    let mut release = VolumeRelease::new(VOLUME, vec![true, true]);
    let (now, managers) = (owner.cluster.now, &mut owner.managers);
    let over = release.advance(now, |server, work| work(&mut managers[server]));
    assert_eq!(over, Ok(false));
    cut(&mut owner);
    let released = release_until(&mut owner, &mut release, |_| false).map(|_| ());
    (owner, released)
}

#[test]
fn t25_a_target_that_has_released_the_volume_is_not_claimed_again() {
    let mut owner = Owner::new(2, 60 * S);
    let mut release = VolumeRelease::new(VOLUME, vec![true, true]);
    owner.cluster.down[1] = true;
    cut(&mut owner);
    let first_has_released = |release: &VolumeRelease| release.first_unanswered() == Some(1);
    assert_eq!(release_until(&mut owner, &mut release, first_has_released), Ok(false));
    cut(&mut owner);
    let absence = owner.managers[0].absence().expect("its association is lost");
    assert!(absence.for_good, "{absence:?}");
    owner.cluster.down[1] = false;
    let mut again = VolumeRelease::new(VOLUME, vec![true, true]);
    assert_eq!(release_until(&mut owner, &mut again, |_| false), Ok(true));
    let owned = |w: &World| w.host.shared.volumes().owner(VOLUME).is_some();
    assert!(!owner.cluster.worlds.iter().any(owned));
}

#[test]
fn a_volume_is_released_on_targets_that_were_unreachable_meanwhile() {
    let (owner, released) = release_across_a_loss(60 * S);
    assert_eq!(released, Ok(()));
    let owned = |w: &World| w.host.shared.volumes().owner(VOLUME).is_some();
    assert!(!owner.cluster.worlds.iter().any(owned));
}

#[test]
fn t25_a_lost_answer_to_a_release_does_not_keep_the_volume_open() {
    let mut owner = Owner::new(1, 60 * S);
    let mut release = VolumeRelease::new(VOLUME, vec![true]);
    let (now, managers) = (owner.cluster.now, &mut owner.managers);
    let over = release.advance(now, |server, work| work(&mut managers[server]));
    assert_eq!(over, Ok(false));
    owner.cluster.mute = Some(0);
    while owner.carry() {}
    let owned = |w: &World| w.host.shared.volumes().owner(VOLUME).is_some();
    assert!(!owner.cluster.worlds.iter().any(owned), "it has released it");
    cut(&mut owner);
    owner.cluster.mute = None;
    assert_eq!(release_until(&mut owner, &mut release, |_| false), Ok(true));
}

#[test]
fn a_volume_is_not_released_on_a_target_that_will_not_come_back() {
    let (_, released) = release_across_a_loss(0);
    assert_eq!(released, Err(StreamsRecoveryError::Unreachable { server: 0 }));
}

use alloc::string::String;
use alloc::vec;

use riopipe_order::engine::EngineKind;
use riopipe_order::log_region::LogKind;

use super::*;
use crate::label::MemberId;
use crate::wire::Extension;

const VOLUME: VolumeId = VolumeId([7; 16]);

fn controller(vwc: bool) -> Controller {
    let namespace = |nsid: u32| Namespace {
        nsid,
        blocks: 1000,
        block_size: 4096,
        metadata: 0,
        read_only: false,
        order: riopipe_order::write_order::DriveOrder::None,
        nguid: [nsid as u8; 16],
        uuid: Some([0x10 + nsid as u8; 16]),
    };
    let extension = Extension {
        version: 1,
        log_kind: Some(LogKind::Dax),
        log_in_memory: false,
        incarnation: 1,
        region: [3; 16],
        boot: [9; 16],
    };
    Controller {
        cntlid: 1,
        version: 0x0002_0000,
        subnqn: String::new(),
        serial: String::new(),
        model: String::new(),
        firmware: String::new(),
        mdts_bytes: 1 << 20,
        in_capsule_bytes: 4096,
        vwc,
        kas: 0,
        sqsize_max: 128,
        queues: 8,
        nn: 3,
        write_zeroes: true,
        deallocate: true,
        extension: Some(extension),
        namespaces: vec![namespace(1), namespace(2), namespace(3)],
    }
}

/// The volume has namespaces 2 and 3.
fn known(vwc: bool) -> KnownTarget {
    let drives = [2, 3].map(|nsid| DriveOfVolume { nsid, index: nsid as u16 + 5, blocks: 900 });
    KnownTarget::new(VOLUME, 7, &controller(vwc), drives)
}

fn check(change: impl FnOnce(&mut Controller)) -> Result<(), Changed> {
    let mut now = controller(false);
    change(&mut now);
    known(false).check(&now)
}

#[test]
fn t27_an_unchanged_target_is_recognised() {
    assert_eq!(check(|_| {}), Ok(()));
    // Another incarnation, another controller of it.
    let another_life = |c: &mut Controller| {
        c.cntlid = 9;
        let extension = c.extension.as_mut().unwrap();
        (extension.incarnation, extension.boot) = (2, [1; 16]);
    };
    assert_eq!(check(another_life), Ok(()));
    assert_eq!(check(|c| c.namespaces[1].blocks = 2000), Ok(()), "there is more of it");
    assert_eq!(check(|c| c.namespaces[1].blocks = 900), Ok(()), "as much as is needed");
    assert_eq!(check(|c| c.namespaces.swap(1, 2)), Ok(()), "named by namespace, not by position");
    assert_eq!(check(|c| c.namespaces.retain(|n| n.nsid != 1)), Ok(()), "not the volume's");
}

#[test]
fn t27_every_relevant_change_is_detected_and_named() {
    type Change = fn(&mut Controller);
    let cases: [(Change, Changed); 9] = [
        (|c| c.extension = None, Changed::Region),
        (|c| c.extension.as_mut().unwrap().region[0] = 4, Changed::Region),
        (|c| c.namespaces.retain(|n| n.nsid != 2), Changed::Missing(2)),
        (|c| c.namespaces[2].nguid[15] = 0, Changed::Replaced(3)),
        (|c| c.namespaces[1].uuid = Some([0; 16]), Changed::Replaced(2)),
        (|c| c.namespaces[1].uuid = None, Changed::Replaced(2)),
        (|c| c.namespaces[2].block_size = 512, Changed::BlockSize { nsid: 3, was: 4096, now: 512 }),
        (|c| c.namespaces[2].blocks = 899, Changed::Shrunk { nsid: 3, needed: 900, now: 899 }),
        (|c| c.vwc = true, Changed::Unprotected(2)),
    ];
    for (change, expected) in cases {
        assert_eq!(check(change), Err(expected));
        let text = alloc::format!("{expected}");
        assert!(text.contains("pen the volume again"), "it does not say what to do: {text}");
    }
}

#[test]
fn t27_a_drive_that_is_protected_now_goes_on_as_if_it_were_not() {
    assert_eq!(known(true).check(&controller(false)), Ok(()));
    assert_eq!(known(true).check(&controller(true)), Ok(()));
}

#[test]
fn t27_labels_are_checked_again() {
    let known = known(false);
    let label = Label {
        volume: VOLUME,
        name: "v".into(),
        block_size: 4096,
        unit_blocks: 1,
        data_blocks: 100,
        prepare_blocks: 0,
        streams: 1,
        engine: EngineKind::Rio,
        index: 8,
        generation: 7,
        sequence: 1,
        members: vec![MemberId::default(); 9],
    };
    assert!(known.namespaces().eq([2, 3]));
    assert_eq!(known.check_label(3, &Ok(label.clone())), Ok(()));
    let older = Label { generation: 6, ..label.clone() };
    assert_eq!(
        known.check_label(3, &Ok(older)),
        Err(Changed::Older(3)),
        "an older copy of the drive"
    );
    let newer = Label { generation: 8, ..label.clone() };
    assert_eq!(known.check_label(3, &Ok(newer)), Err(Changed::TakenOver(3)), "by another");
    assert_eq!(known.check_label(2, &Ok(label.clone())), Err(Changed::Label(2)), "another member");
    let other = Label { volume: VolumeId([8; 16]), ..label };
    assert_eq!(known.check_label(3, &Ok(other)), Err(Changed::Label(3)));
    assert_eq!(known.check_label(3, &Err(LabelError::Blank)), Err(Changed::Label(3)));
}
